"""The body of `POST /v1/responses`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, structs

from tandem.frontend.api.responses.input_items import INPUT, parse_input
from tandem.frontend.errors import unsupported
from tandem.frontend.grammar.json_schema import SchemaError, check_schema
from tandem.frontend.request.conversation import (
    REASONING_EFFORT,
    TEMPLATE_KWARGS_FIELD,
    Conversation,
    template_kwargs,
)
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.kinds import Integer, Parsed, String, Typed
from tandem.frontend.request.options import INT32_MAX, OPTION_FIELDS, GenerationOptions, generation_options
from tandem.frontend.request.schema import Schema, array, closed, constant, nullable, of_type
from tandem.frontend.request.tools import (
    MAX_TOOLS,
    PARALLEL_FIELD,
    FunctionSpec,
    RequestedChoice,
    Tool,
    ToolUse,
    checked_tools,
    tool_use,
)
from tandem.frontend.request.unserved_kinds import Unsupported
from tandem.frontend.request.values import decode_exact

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

INCLUDES = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Values of `include` that change nothing: reasoning is returned unencrypted, and the other outputs never exist."""

NOT_HERE = ("n", "response_format", "return_token_ids", "stream_format")
"""Shared options that a response lacks, or has under another name."""


class ResponsesRequest(Struct, frozen=True):
    """A validated request to `/v1/responses`."""

    options: GenerationOptions
    conversation: Conversation
    tool_use: ToolUse
    settings: dict[str, Any]
    """The fields of a response that repeat the settings of its request."""


class _Plain(Struct, tag_field="type", tag="text"):
    pass


class _JsonObject(Struct, tag_field="type", tag="json_object"):
    pass


class _JsonSchema(Struct, tag_field="type", tag="json_schema"):
    name: Annotated[str, Meta(min_length=1)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class _Text(Struct):
    format: _Plain | _JsonObject | _JsonSchema | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Struct):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    """Accepted without effect, because this server writes no summaries."""
    generate_summary: Literal["auto"] | None = None


class _Tool(FunctionSpec, tag_field="type", tag="function"):
    pass


class _Named(Struct, tag_field="type", tag="function"):
    name: str


class _Allowed(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Meta(extra_json_schema={"minItems": 1})]


_Choice = Literal["none", "auto", "required"] | _Named | _Allowed


def _parse_instructions(raw: Raw, _: IgnoredFields) -> str:
    """Parse the instructions, which may be as long as the input."""
    text: str = decode_exact(raw, "instructions", str, "a string")
    return text


_REASONING: Schema = nullable(
    closed(
        {},
        {
            "effort": REASONING_EFFORT.schema(),
            "summary": constant("auto"),
            "generate_summary": constant("auto"),
        },
    )
)
_METADATA: Schema = nullable(
    {
        "type": "object",
        "propertyNames": {"maxLength": MAX_METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
        "maxProperties": MAX_METADATA,
    }
)
_OWN_FIELDS = (
    Field("input", Parsed(parse_input, INPUT), "The conversation so far.", required=True),
    Field("instructions", Parsed(_parse_instructions, {"type": ["string", "null"]}), "A system message."),
    Field(
        "max_output_tokens",
        Integer(1, INT32_MAX),
        "By default as many as there is room for, at most the server's --default-max-tokens.",
    ),
    Field("text", Typed(_Text), "Constrain the output to JSON, or to a JSON Schema."),
    Field(
        "tools", Typed(list[_Tool], nullable(array(of_type(_Tool), MAX_TOOLS))), "Functions that the model may call."
    ),
    Field("tool_choice", Typed(_Choice), "Which functions may or must be called."),
    PARALLEL_FIELD,
    Field("reasoning", Typed(_Reasoning, _REASONING), "How much the model should reason before it answers."),
    TEMPLATE_KWARGS_FIELD,
    Field("include", Typed(list[str], nullable({"type": "array", "items": {"enum": [*INCLUDES]}}))),
    Field("metadata", Typed(dict[str, str], _METADATA), "Repeated in the response."),
    *(Field(name, String(), "Repeated in the response.") for name in ("prompt_cache_key", "safety_identifier", "user")),
    Field("store", Unsupported((False,))),
    Field("background", Unsupported((False,))),
    Field("background_options", Unsupported()),
    Field("previous_response_id", Unsupported()),
    Field("conversation", Unsupported()),
    Field("prompt", Unsupported()),
    Field("truncation", Unsupported(("disabled",))),
    Field("max_tool_calls", Unsupported()),
    Field("top_logprobs", Unsupported((0,))),
    Field("context_management", Unsupported()),
    Field("moderation", Unsupported()),
    Field("access_programs", Unsupported()),
    Field("image", Unsupported()),
)
_OWN_NAMES = {field.name for field in _OWN_FIELDS}
BODY = BodyFormat((*(field for field in OPTION_FIELDS if field.name not in {*NOT_HERE, *_OWN_NAMES}), *_OWN_FIELDS))


def parse_responses(body: bytes, default_max_tokens: int, ignored: IgnoredFields) -> ResponsesRequest:
    """Parse the body of `/v1/responses`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    values = BODY.read(body, ignored)
    _check_include(values["include"] or [])
    options = generation_options(values, values["max_output_tokens"], default_max_tokens, None)
    text: _Text = values["text"] or _Text()
    reasoning: _Reasoning = values["reasoning"] or _Reasoning()
    if reasoning.effort is not None:
        REASONING_EFFORT.check("reasoning.effort", reasoning.effort)
    tools = _tools(values["tools"] or [])
    use = tool_use(tools, _requested(values["tool_choice"]), values["parallel_tool_calls"])
    system = [] if values["instructions"] is None else [{"role": "system", "content": values["instructions"]}]
    conversation = Conversation(
        messages=[*system, *values["input"]],
        tools=use.template_tools,
        template_kwargs=template_kwargs(values),
        reasoning_effort=reasoning.effort,
    )
    settings = {
        **{name: values[name] for name in _ECHOED},
        "metadata": _checked_metadata(values["metadata"] or {}),
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "text": {"format": msgspec.to_builtins(text.format or _Plain()), "verbosity": "medium"},
        "tool_choice": msgspec.to_builtins(values["tool_choice"] or "auto"),
        "tools": [_described(tool) for tool in tools],
        **_FIXED,
    }
    constrained = structs.replace(options, response_format=_response_format(text))
    return ResponsesRequest(constrained, conversation, use, settings)


SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling parameters that the response repeats, with the served model's defaults for those left out."""
_ECHOED = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"),
    *SAMPLED,
)
"""Fields that the response repeats as they were parsed."""
_FIXED = {
    "background": False, "max_tool_calls": None, "previous_response_id": None, "service_tier": "default",
    "store": False, "top_logprobs": 0, "truncation": "disabled",
}  # fmt: skip


def _check_include(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in INCLUDES:
            raise unsupported(f"{{param}}: {name[:80]!r} is not supported", f"include[{index}]")


def _checked_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > MAX_METADATA:
        raise unsupported(f"{{param}} takes at most {MAX_METADATA} pairs, not {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise unsupported(
                f"{{param}} takes keys of at most {MAX_METADATA_KEY} characters and values of at most "
                f"{MAX_METADATA_VALUE}; the value of {key[:MAX_METADATA_KEY]!r} has {len(value)}, its key {len(key)}",
                "metadata",
            )
    return metadata


def _response_format(text: _Text) -> dict[str, Any] | None:
    """Convert the format to the `response_format` of a chat."""
    match text.format:
        case None | _Plain():
            return None
        case _JsonObject():
            return {"type": "json_object"}
        case wanted:
            return {"type": "json_schema", "json_schema": structs.asdict(wanted)}


def _tools(tools: Sequence[_Tool]) -> tuple[Tool, ...]:
    return checked_tools([structs.replace(tool, strict=_strict(tool)) for tool in tools], "name")


def _strict(tool: _Tool) -> bool:
    """Tell whether the arguments of a tool are constrained to their schema.

    By default they are if the schema is supported.
    """
    if tool.strict is not None or tool.parameters is None:
        return bool(tool.strict)
    try:
        check_schema(tool.parameters)
    except SchemaError:
        return False
    return True


def _requested(choice: Any) -> RequestedChoice | None:
    match choice:
        case None:
            return None
        case _Named(name=name):
            return RequestedChoice("required", name=name)
        case _Allowed(mode=mode, tools=tools):
            return RequestedChoice(mode, allowed=tuple(tool.name for tool in tools))
        case mode:
            return RequestedChoice(mode)


def _described(tool: Tool) -> dict[str, Any]:
    function = {"description": None, "parameters": None, **tool.template_form["function"]}
    return {"type": "function", **function, "strict": tool.strict}
