"""Conversations: the request fields that a chat template renders."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.field_types import Boolean, JsonObject, OneOf, Parsed, Typed
from tandem.frontend.request.fields import Field
from tandem.frontend.request.messages import MESSAGES, parse_messages
from tandem.frontend.request.tools import TOOL_FIELDS, ToolUse


class _Thinking(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"


class _Reasoning(Struct, frozen=True):
    effort: str | None = None
    enabled: bool | None = None


REASONING_EFFORT = OneOf(("none", "minimal", "low", "medium", "high", "xhigh"))

TEMPLATE_KWARGS_FIELD = Field("chat_template_kwargs", JsonObject(), "Further variables of the chat template.")
MESSAGES_FIELD = Field("messages", Parsed(parse_messages, MESSAGES), "The conversation so far.", required=True)
RENDERING_FIELDS = (
    *TOOL_FIELDS,
    Field("add_generation_prompt", Boolean(None), "End the prompt with the header of the assistant's message."),
    Field("continue_final_message", Boolean(), "Continue the last message instead of beginning a new one."),
    TEMPLATE_KWARGS_FIELD,
    Field("documents", Typed(list[dict[str, Any]]), "Documents for a template that reads them; otherwise refused."),
    Field(
        "reasoning_effort",
        REASONING_EFFORT,
        "How much the model should reason before it answers, or `none`; ignored by a template that does not read it.",
    ),
    Field("reasoning", Typed(_Reasoning), "OpenRouter's form of `reasoning_effort` and `enable_thinking`."),
    Field("enable_thinking", Boolean(None), "Whether the model reasons; ignored by a template that does not read it."),
    Field("think", Boolean(None), "Ollama's name of `enable_thinking`."),
    Field("thinking", Typed(bool | _Thinking), "Anthropic's form of `enable_thinking`."),
)
"""The fields besides `messages` that determine what a chat template renders."""

RESERVED_KWARGS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tool_choice"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("raise_exception", "strftime_now", "namespace", "range", "chat_template", "chat_template_kwargs"),
    }
)
"""Template variables that requests cannot set: the conversation, special tokens and the template's functions."""


class Conversation(Struct, frozen=True):
    """The input of a chat template."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    effort_field: str = "reasoning_effort"
    """Field of the request that `reasoning_effort` comes from."""
    effort_switches: bool = True
    """True if the effort also turns reasoning on or off in templates that only support `enable_thinking`."""
    thinking: bool | None = None
    """Whether the model should reason; None to leave it to the template."""
    thinking_field: str = "enable_thinking"
    """Field of the request that `thinking` comes from."""
    documents: tuple[dict[str, Any], ...] = ()


def conversation(values: Mapping[str, Any], tool_use: ToolUse) -> Conversation:
    """Build a conversation from the parsed fields of a body.

    Raises ApiError 400 for conflicting fields.
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
    reasoning: _Reasoning = values["reasoning"] or _Reasoning()
    effort, effort_field = values["reasoning_effort"], "reasoning_effort"
    if effort is None and reasoning.effort is not None:
        effort_field = "reasoning.effort"
        effort = REASONING_EFFORT.check(effort_field, reasoning.effort)
    thinking_field, thinking = _thinking(values, reasoning)
    return Conversation(
        messages=values["messages"],
        tools=tool_use.template_tools,
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs(values),
        reasoning_effort=effort,
        effort_field=effort_field,
        thinking=thinking,
        thinking_field=thinking_field,
        documents=tuple(values["documents"] or ()),
    )


def _thinking(values: Mapping[str, Any], reasoning: _Reasoning) -> tuple[str, bool | None]:
    """Return the first field that turns reasoning on or off, and its value."""
    thinking = values["thinking"]
    if isinstance(thinking, _Thinking):
        # "adaptive" is left to the model.
        thinking = None if thinking.type in ("adaptive", "auto") else thinking.type == "enabled"
    given = {
        "enable_thinking": values["enable_thinking"],
        "thinking": thinking,
        "think": values["think"],
        "reasoning.enabled": reasoning.enabled,
    }
    return next(((name, value) for name, value in given.items() if value is not None), ("enable_thinking", None))


def template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return additional template variables.

    Raises ApiError 400 for a variable that requests cannot set.
    """
    kwargs: dict[str, Any] = values["chat_template_kwargs"] or {}
    for name in kwargs:
        if name in RESERVED_KWARGS:
            raise unsupported(
                "{param} may not be set: the server gives this variable to the template", f"chat_template_kwargs.{name}"
            )
    return kwargs
