"""The body of `POST /v1/responses`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from tandem.frontend.api.responses.input_items import parse_input
from tandem.frontend.errors import unsupported
from tandem.frontend.grammar.json_schema import SchemaError, check_schema
from tandem.frontend.request.conversation import Conversation, check_reasoning_effort, read_template_kwargs
from tandem.frontend.request.fields import BodyFormat, FieldReader, decode_field, misshapen, wrong_type
from tandem.frontend.request.options import INT32_MAX, OPTION_NAMES, GenerationOptions, optional_integer, read_options
from tandem.frontend.request.tools import Function, Tool, ToolUse, Wanted, checked_tools, tool_use

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "background_options": (),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "context_management": (),
    "moderation": (),
    "access_programs": (),
    "image": (),
}

INCLUDES = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Values of `include` that change nothing: thoughts go out in the clear, and nothing else of these is ever there."""

NOT_HERE = ("n", "response_format", "return_token_ids", "stream_format")
"""Options that a response cannot have, or has under another name."""

_NAMES = (
    "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "parallel_tool_calls", "reasoning",
    "include", "chat_template_kwargs",
)  # fmt: skip
_BODY = BodyFormat((*(name for name in OPTION_NAMES if name not in NOT_HERE), *_NAMES, *_NEUTRAL))


class ResponsesRequest(Struct, frozen=True):
    """A validated request."""

    options: GenerationOptions
    conversation: Conversation
    tool_use: ToolUse
    settings: dict[str, Any]
    """The fields of a response that say what it was asked with."""


class _Plain(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class _JsonObject(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class _JsonSchema(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class _Text(Struct, forbid_unknown_fields=True):
    format: _Plain | _JsonObject | _JsonSchema | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    """As much of a summary as there is, which is none."""
    generate_summary: Literal["auto"] | None = None


class _Tool(Function, tag_field="type", tag="function", forbid_unknown_fields=True):
    pass


class _Named(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class _Allowed(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_Named]


_Choice = Literal["none", "auto", "required"] | _Named | _Allowed


def parse_responses(body: bytes, default_max_tokens: int) -> ResponsesRequest:
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
    fields = FieldReader(_BODY.split(body))
    fields.neutral(_NEUTRAL)
    _check_include(fields)
    most = optional_integer(fields, "max_output_tokens", 1, INT32_MAX)
    options = read_options(fields, most, default_max_tokens, None)
    text: _Text = fields.shaped("text", _Text) or _Text()
    reasoning: _Reasoning = fields.shaped("reasoning", _Reasoning) or _Reasoning()
    tools, choice = _tools(fields), fields.shaped("tool_choice", _Choice)
    use = tool_use(tools, _wanted(choice), fields.boolean("parallel_tool_calls", True))
    instructions = _instructions(fields)
    conversation = Conversation(
        messages=parse_input(fields.raw("input"), instructions),
        tools=tuple(tool.shown for tool in use.tools) if use.active else (),
        template_kwargs=read_template_kwargs(fields),
        reasoning_effort=check_reasoning_effort(reasoning.effort, "reasoning.effort"),
    )
    settings = {
        "instructions": instructions,
        "max_output_tokens": most,
        "metadata": _metadata(fields),
        "parallel_tool_calls": use.parallel,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "text": {"format": msgspec.to_builtins(text.format or _Plain()), "verbosity": "medium"},
        "tool_choice": msgspec.to_builtins(choice or "auto"),
        "tools": [_described(tool) for tool in tools],
        **{name: _label(fields, name) for name in ("prompt_cache_key", "safety_identifier", "user")},
        **{name: getattr(options, name) for name in _ECHOED},
        **_FIXED,
    }
    fields.finish()
    held = structs.replace(options, response_format=_response_format(text))
    return ResponsesRequest(held, conversation, use, settings)


_ECHOED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_FIXED = {
    "background": False, "max_tool_calls": None, "previous_response_id": None, "service_tier": "default",
    "store": False, "top_logprobs": 0, "truncation": "disabled",
}  # fmt: skip


def _check_include(fields: FieldReader) -> None:
    found: list[str] = fields.shaped("include", list[str]) or []
    for index, name in enumerate(found):
        if name not in INCLUDES:
            place = f"include[{index}]"
            raise unsupported(f"{place!r}: {name[:80]!r} is not supported", place)


def _instructions(fields: FieldReader) -> str | None:
    """As long as the context takes, like the input."""
    raw = fields.raw("instructions")
    try:
        return None if raw is None else decode_field(raw, "instructions", str | None)
    except msgspec.ValidationError as error:
        raise misshapen(error, "instructions") from None


def _metadata(fields: FieldReader) -> dict[str, str]:
    found: dict[str, str] = fields.shaped("metadata", dict[str, str]) or {}
    if len(found) > MAX_METADATA:
        raise unsupported(f"'metadata' takes at most {MAX_METADATA} pairs, not {len(found)}", "metadata")
    for key, value in found.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise unsupported(
                f"'metadata' takes keys of at most {MAX_METADATA_KEY} characters and values of at most "
                f"{MAX_METADATA_VALUE}; the value of {key[:MAX_METADATA_KEY]!r} has {len(value)}, its key {len(key)}",
                "metadata",
            )
    return found


def _label(fields: FieldReader, name: str) -> str | None:
    value = fields.take(name)
    if value is None or isinstance(value, str):
        return value
    raise wrong_type(name, "a string", value)


def _response_format(text: _Text) -> dict[str, Any] | None:
    """The same in the shape of a chat."""
    match text.format:
        case None | _Plain():
            return None
        case _JsonObject():
            return {"type": "json_object"}
        case wanted:
            return {"type": "json_schema", "json_schema": structs.asdict(wanted)}


def _tools(fields: FieldReader) -> tuple[Tool, ...]:
    found: list[_Tool] = fields.shaped("tools", list[_Tool]) or []
    return checked_tools([structs.replace(tool, strict=_strict(tool)) for tool in found], "name")


def _strict(tool: _Tool) -> bool:
    """Without a word of it, arguments are held to their schema where that can be done."""
    if tool.strict is not None or tool.parameters is None:
        return bool(tool.strict)
    try:
        check_schema(tool.parameters)
    except SchemaError:
        return False
    return True


def _wanted(choice: Any) -> Wanted | None:
    match choice:
        case None:
            return None
        case _Named(name=name):
            return Wanted("required", name=name)
        case _Allowed(mode=mode, tools=tools):
            return Wanted(mode, allowed=tuple(tool.name for tool in tools))
        case mode:
            return Wanted(mode)


def _described(tool: Tool) -> dict[str, Any]:
    shown = {"description": None, "parameters": None, **tool.shown["function"]}
    return {"type": "function", **shown, "strict": tool.strict}
