"""Conversations: the request fields that a chat template renders."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.fields import Field
from tandem.frontend.request.kinds import Boolean, JsonObject, OneOf, Parsed
from tandem.frontend.request.messages import MESSAGES, parse_messages
from tandem.frontend.request.tools import TOOL_FIELDS, ToolUse

REASONING_EFFORT = OneOf(("none", "minimal", "low", "medium", "high", "xhigh"))

TEMPLATE_KWARGS_FIELD = Field("chat_template_kwargs", JsonObject(), "Further variables of the chat template.")
MESSAGES_FIELD = Field("messages", Parsed(parse_messages, MESSAGES), "The conversation so far.", required=True)
RENDERING_FIELDS = (
    *TOOL_FIELDS,
    Field("add_generation_prompt", Boolean(None), "End the prompt with the header of the assistant's message."),
    Field("continue_final_message", Boolean(), "Continue the last message instead of beginning a new one."),
    TEMPLATE_KWARGS_FIELD,
    Field("reasoning_effort", REASONING_EFFORT, "How much the model should reason before it answers."),
)
"""The fields besides `messages` that determine what a chat template renders."""

_RESERVED_KWARGS = {field.name for field in (MESSAGES_FIELD, *RENDERING_FIELDS)}


class Conversation(Struct, frozen=True):
    """The input of a chat template."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


def conversation(values: Mapping[str, Any], tool_use: ToolUse) -> Conversation:
    """Build a conversation from the parsed fields of a body.

    Raises ApiError 400 for contradicting fields.
    """
    continues = values["continue_final_message"]
    generation_prompt = values["add_generation_prompt"]
    if generation_prompt is None:
        generation_prompt = not continues
    if continues and generation_prompt:
        raise unsupported(
            "{param} and {other} exclude each other; give one of them",
            "continue_final_message",
            "add_generation_prompt",
        )
    return Conversation(
        messages=values["messages"],
        tools=tool_use.template_tools,
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs(values),
        reasoning_effort=values["reasoning_effort"],
    )


def template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further variables of the template.

    Raises ApiError 400 for a variable named like a request field.
    """
    kwargs: dict[str, Any] = values["chat_template_kwargs"] or {}
    for name in kwargs:
        if name in _RESERVED_KWARGS:
            raise unsupported("'chat_template_kwargs' may not contain {param}; it is a field of its own", name)
    return kwargs
