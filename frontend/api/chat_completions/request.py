"""The body of `POST /v1/chat/completions`."""

from typing import Any

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.conversation import CONVERSATION_NAMES, Conversation, read_conversation
from tandem.frontend.request.fields import BodyFormat, FieldReader
from tandem.frontend.request.options import (
    INT32_MAX,
    MAX_TOP_LOGPROBS,
    OPTION_NAMES,
    GenerationOptions,
    optional_integer,
    read_options,
    refused_with_events,
)
from tandem.frontend.request.tools import ToolUse, read_tool_use

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "functions": (),
    "function_call": (),
}


class ChatRequest(Struct, frozen=True):
    """A validated request."""

    options: GenerationOptions
    conversation: Conversation
    tool_use: ToolUse


_BODY = BodyFormat((*OPTION_NAMES, *CONVERSATION_NAMES, *_NEUTRAL, "max_completion_tokens", "logprobs", "top_logprobs"))


def parse_chat(body: bytes, default_max_tokens: int) -> ChatRequest:
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
    fields = FieldReader(_BODY.split(body))
    fields.neutral(_NEUTRAL)
    options = read_options(fields, _max_tokens(fields), default_max_tokens, _logprobs(fields))
    tool_use = read_tool_use(fields)
    if options.stream_events and tool_use.active:
        raise refused_with_events("tools")
    conversation = read_conversation(fields, tool_use)
    fields.finish()
    return ChatRequest(options, conversation, tool_use)


def _max_tokens(fields: FieldReader) -> int | None:
    old = optional_integer(fields, "max_tokens", 1, INT32_MAX)
    new = optional_integer(fields, "max_completion_tokens", 1, INT32_MAX)
    if old is not None and new is not None and old != new:
        raise unsupported(
            f"'max_tokens' ({old}) is the old name of 'max_completion_tokens' ({new}); give one", "max_tokens"
        )
    return old if new is None else new


def _logprobs(fields: FieldReader) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = optional_integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise unsupported("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return top or 0 if wanted else None
