"""Conversations: what a chat template renders, and how it is read from a body."""

from typing import Any

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.fields import FieldReader, wrong_type
from tandem.frontend.request.messages import parse_messages
from tandem.frontend.request.tools import ToolUse

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

CONVERSATION_NAMES = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip


class Conversation(Struct, frozen=True):
    """What a chat template renders."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


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
