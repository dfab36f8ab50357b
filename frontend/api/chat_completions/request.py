"""The body of `POST /v1/chat/completions`."""

from typing import Any

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.fields import BodyFormat, FieldReader, wrong_type
from tandem.frontend.request.messages import parse_messages
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

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

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


class Conversation(Struct, frozen=True):
    """What a chat template renders."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


class ChatRequest(Struct, frozen=True):
    """A validated request."""

    options: GenerationOptions
    conversation: Conversation
    tool_use: ToolUse


CONVERSATION_NAMES = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip

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


def read_conversation(fields: FieldReader, tool_use: ToolUse) -> Conversation:
    """Takes the fields that say what a template renders."""
    messages = parse_messages(fields.raw("messages"))
    continues = fields.boolean("continue_final_message", False)
    generation_prompt = fields.boolean("add_generation_prompt", not continues)
    if continues and generation_prompt:
        raise unsupported(
            "'continue_final_message' and 'add_generation_prompt' exclude each other", "continue_final_message"
        )
    return Conversation(
        messages=messages,
        tools=tuple(tool.shown for tool in tool_use.tools) if tool_use.active else (),
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        template_kwargs=read_template_kwargs(fields),
        reasoning_effort=_reasoning_effort(fields),
    )


def read_template_kwargs(fields: FieldReader) -> dict[str, Any]:
    """Takes the values that a chat template gets beside the conversation."""
    kwargs = fields.object("chat_template_kwargs") or {}
    for name in kwargs:
        if name in ("messages", "tools", *CONVERSATION_NAMES):
            raise unsupported(f"'chat_template_kwargs' may not hold {name!r}; it is a field of its own", name)
    return kwargs


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


def _reasoning_effort(fields: FieldReader) -> str | None:
    value = fields.take("reasoning_effort")
    if value is None or isinstance(value, str):
        return check_reasoning_effort(value, "reasoning_effort")
    raise wrong_type("reasoning_effort", "a string", value)


def check_reasoning_effort(value: str | None, place: str) -> str | None:
    """The value. Raises ApiError 422 for one that nobody knows."""
    if value is not None and value not in REASONING_EFFORTS:
        raise unsupported(f"{place!r} must be one of {', '.join(REASONING_EFFORTS)}, not {value[:40]!r}", place)
    return value
