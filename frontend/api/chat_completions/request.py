"""The body of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.conversation import MESSAGES_FIELD, RENDERING_FIELDS, Conversation, conversation
from tandem.frontend.request.field_types import Boolean, Ignored, Integer, Unsupported
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import (
    INT32_MAX,
    OPTION_FIELDS,
    UNLIMITED,
    GenerationOptions,
    generation_options,
    rejected_with_events,
)
from tandem.frontend.request.prediction import PREDICTION_FIELD
from tandem.frontend.request.tools import ToolUse, chat_tool_use
from tandem.protocol.params import MAX_TOP_LOGPROBS

BODY = BodyFormat(
    (
        *OPTION_FIELDS,
        MESSAGES_FIELD,
        *RENDERING_FIELDS,
        Field(
            "max_tokens",
            Integer(UNLIMITED, INT32_MAX),
            "The old name of `max_completion_tokens`.",
            extra={"deprecated": True},
        ),
        Field(
            "max_completion_tokens",
            Integer(UNLIMITED, INT32_MAX),
            "By default all that the context has room for, at most --default-max-tokens if set; -1 for no limit.",
        ),
        Field("logprobs", Boolean(), "Return the log-probability of each token."),
        Field("top_logprobs", Integer(0, MAX_TOP_LOGPROBS), "Number of alternatives reported with each token."),
        Field("modalities", Unsupported((["text"],)), "Answers are text."),
        Field("audio", Unsupported(), "Answers are text."),
        PREDICTION_FIELD,
        Field("verbosity", Ignored(("medium",)), "Models here are not trained on it; say it in a message."),
        Field("include_reasoning", Ignored((True,)), "Reasoning is returned apart from the answer."),
        Field("separate_reasoning", Ignored((True,)), "Reasoning is returned apart from the answer."),
        Field("stream_reasoning", Ignored((True,)), "Reasoning is streamed."),
        Field("chat_template", Unsupported(), "The server's --chat-template is used."),
        Field("add_special_tokens", Unsupported((False,)), "The template writes the special tokens."),
        Field("web_search_options", Unsupported(), "The server searches nothing."),
        Field("moderation", Unsupported(), "Nothing is moderated."),
        Field("echo", Unsupported((False,)), "A chat returns the answer alone."),
        Field("best_of", Unsupported((1,)), "A chat returns all `n` choices."),
    )
)


class ChatRequest(Struct, frozen=True):
    """Validated request to `/v1/chat/completions`."""

    options: GenerationOptions
    conversation: Conversation
    tool_use: ToolUse


def parse_chat(body: bytes, default_max_tokens: int | None, ignored: IgnoredFields) -> ChatRequest:
    """Parse the body of `/v1/chat/completions`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    values = BODY.read(body, ignored)
    max_tokens = _max_tokens(values, ignored)
    options = generation_options(values, max_tokens, default_max_tokens, _logprobs(values), ignored)
    tool_use = chat_tool_use(values)
    if options.stream_events and tool_use.active:
        raise rejected_with_events("tools")
    return ChatRequest(options, conversation(values, tool_use), tool_use)


def _max_tokens(values: Mapping[str, Any], ignored: IgnoredFields) -> int | None:
    """Return the token limit.

    If two are given, the newer field is used.
    """
    for name in ("max_tokens", "max_completion_tokens"):
        if values[name] == 0:
            raise unsupported(f"{{param}} must be between 1 and {INT32_MAX}, or -1 for no limit, not 0", name)
    old: int | None = values["max_tokens"]
    new: int | None = values["max_completion_tokens"]
    if old is not None and new is not None and old != new:
        ignored.add("max_tokens")
    return old if new is None else new


def _logprobs(values: Mapping[str, Any]) -> int | None:
    top: int = values["top_logprobs"] or 0
    if top and not values["logprobs"]:
        raise unsupported("{param} needs 'logprobs': true", "top_logprobs")
    return top if values["logprobs"] else None
