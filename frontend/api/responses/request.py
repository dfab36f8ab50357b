"""Parse the body of `POST /v1/responses`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, structs

from tandem.frontend.api.responses.input_items import INPUT, InputItem, parse_input
from tandem.frontend.api.responses.item_messages import item_messages
from tandem.frontend.api.responses.tools import TOOLS, ResponseTools, ToolSpecs, collect_tools, parse_tools
from tandem.frontend.errors import unsupported
from tandem.frontend.request.conversation import (
    REASONING_EFFORT,
    TEMPLATE_KWARGS_FIELD,
    Conversation,
    template_kwargs,
)
from tandem.frontend.request.extra_fields import SINGLE_ANSWER, SINGLE_ANSWER_FIELDS
from tandem.frontend.request.field_types import Boolean, Integer, OneOf, Parsed, String, Typed, Unsupported
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import INT32_MAX, OPTION_FIELDS, GenerationOptions, generation_options
from tandem.frontend.request.schema import Schema, constant, nullable, opened
from tandem.frontend.request.tools import PARALLEL_FIELD, RequestedChoice, ToolUse, tool_use
from tandem.frontend.request.values import decode_exact
from tandem.protocol.params import MAX_TOP_LOGPROBS

MAX_ID_CHARS = 256
"""Maximum length of a response id in a request, in characters."""
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

INCLUDES = (
    "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Values of `include` without effect: no output has these fields."""
INCLUDE_REASONING = "reasoning.encrypted_content"
"""Value of `include` that requests reasoning in a form to send back in the next turn."""
INCLUDE_LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities of the text."""


class ResponsesRequest(Struct, frozen=True):
    """A validated request to `/v1/responses`."""

    options: GenerationOptions
    input: list[InputItem]
    instructions: str | None
    """System message of this response; not inherited by responses that continue it."""
    given_tools: ToolSpecs
    """Value of `tools`."""
    given_choice: Any
    parallel: bool
    template_kwargs: dict[str, Any]
    reasoning_effort: str | None
    previous_response_id: str | None
    """Id of the stored response to continue."""
    store: bool
    """True if the response is to be stored."""
    carries_reasoning: bool
    """True if reasoning items have `encrypted_content`."""
    settings: dict[str, Any]
    """Response fields that echo the settings of the request."""
    tools: ResponseTools = ResponseTools()
    tool_use: ToolUse = ToolUse()

    def with_tools(self, earlier: Sequence[InputItem], ignored: IgnoredFields) -> "ResponsesRequest":
        """Return the request with its tools and the ones that items of its conversation add.

        Raises ApiError 400 if tool names are not unique, or if `tool_choice` names a tool that does not exist.
        """
        added = [item.tools for item in (*earlier, *self.input) if item.tools is not None]
        tools = collect_tools([self.given_tools, *added], ignored)
        use = _tool_use(tools, self.given_choice, self.parallel)
        settings = {**self.settings, "tools": list(tools.described)}
        return structs.replace(self, tools=tools, tool_use=use, settings=settings)

    def conversation(self, items: Sequence[InputItem]) -> Conversation:
        """Build the conversation of all items that the model reads."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return Conversation(
            messages=[*system, *item_messages(items, self.tools)],
            tools=self.tool_use.template_tools,
            template_kwargs=self.template_kwargs,
            reasoning_effort=self.reasoning_effort,
            effort_field="reasoning.effort",
        )


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
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted without effect: no supported model was trained to read it."""


class _Reasoning(Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted without effect: Tandem does not write summaries."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class _Function(Struct, tag_field="type", tag="function", omit_defaults=True):
    name: str
    namespace: str | None = None


class _Custom(Struct, tag_field="type", tag="custom", omit_defaults=True):
    name: str
    namespace: str | None = None


class _AllowedTool(Struct, omit_defaults=True):
    type: str
    name: str = ""
    namespace: str | None = None


class _Allowed(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_AllowedTool], Meta(extra_json_schema={"minItems": 1})]


_Choice = Literal["none", "auto", "required"] | _Function | _Custom | _Allowed


def _parse_instructions(raw: Raw, _: IgnoredFields) -> str:
    """Parse the instructions, with the same length limit as the input."""
    text: str = decode_exact(raw, "instructions", str, "a string")
    return text


_REASONING: Schema = nullable(
    opened(
        {},
        {
            "effort": REASONING_EFFORT.schema(),
            **{name: constant("auto", "concise", "detailed") for name in ("summary", "generate_summary")},
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
        "By default all that the context has room for, at most --default-max-tokens if set.",
    ),
    Field("text", Typed(_Text), "Constrain the output to JSON, or to a JSON Schema."),
    Field("tools", Parsed(parse_tools, TOOLS), "Functions that the model may call."),
    Field("tool_choice", Typed(_Choice), "Which functions may or must be called."),
    PARALLEL_FIELD,
    Field("reasoning", Typed(_Reasoning, _REASONING), "How much the model should reason before it answers."),
    TEMPLATE_KWARGS_FIELD,
    Field("include", Typed(list[str]), "Further parts of the response: log-probabilities of its text."),
    Field("metadata", Typed(dict[str, str], _METADATA), "Repeated in the response."),
    *(Field(name, String(), "Repeated in the response.") for name in ("prompt_cache_key", "safety_identifier", "user")),
    Field("store", Boolean(None), "Store the response, so that another can continue it. By default true."),
    Field("previous_response_id", String(MAX_ID_CHARS), "The stored response that this one continues."),
    Field("top_logprobs", Integer(0, MAX_TOP_LOGPROBS), "Alternatives reported for each token of the text."),
    Field("truncation", OneOf(("auto", "disabled")), "A conversation that is too long is refused, never cut."),
    Field("max_tool_calls", Integer(1, INT32_MAX), "Limits tools that OpenAI hosts; this server has none."),
    Field("background", Unsupported((False,)), "Responses are made while the client waits."),
    Field("background_options", Unsupported(), "Responses are made while the client waits."),
    Field("conversation", Unsupported(), "`previous_response_id` continues a conversation."),
    Field("prompt", Unsupported(), "Prompts are not stored."),
    Field("context_management", Unsupported(), "A conversation is never shortened."),
    Field("moderation", Unsupported(), "Nothing is moderated."),
    Field("access_programs", Unsupported(), "No program runs in this server."),
    Field("image", Unsupported(), "Answers are text."),
    Field("response_format", Unsupported(({"type": "text"},)), "`text.format` takes it."),
    *SINGLE_ANSWER_FIELDS,
)
_OWN_NAMES = {field.name for field in _OWN_FIELDS}
BODY = BodyFormat((*(field for field in OPTION_FIELDS if field.name not in _OWN_NAMES), *_OWN_FIELDS))


def parse_responses(body: bytes, default_max_tokens: int | None, ignored: IgnoredFields) -> ResponsesRequest:
    """Parse the body of `/v1/responses`.

    Raises ApiError 400 if it is malformed, or if a value is out of range or unsupported.
    """
    values = BODY.read(body, ignored)
    logprobs = _logprobs(values, ignored)
    options = generation_options(
        {**values, **SINGLE_ANSWER}, values["max_output_tokens"], default_max_tokens, logprobs, ignored
    )
    text: _Text = values["text"] or _Text()
    reasoning: _Reasoning = values["reasoning"] or _Reasoning()
    if reasoning.effort is not None:
        REASONING_EFFORT.check("reasoning.effort", reasoning.effort)
    _report_ignored(values, text, reasoning, ignored)
    settings = {
        **{name: values[name] for name in _ECHOED},
        "metadata": _checked_metadata(values["metadata"] or {}),
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "text": {"format": msgspec.to_builtins(text.format or _Plain()), "verbosity": text.verbosity or "medium"},
        "tool_choice": msgspec.to_builtins(values["tool_choice"] or "auto"),
        "top_logprobs": values["top_logprobs"] or 0,
        **_FIXED,
    }
    request = ResponsesRequest(
        options=structs.replace(options, response_format=_response_format(text)),
        input=values["input"],
        instructions=values["instructions"],
        given_tools=values["tools"] or ToolSpecs(),
        given_choice=values["tool_choice"] or "auto",
        parallel=values["parallel_tool_calls"],
        template_kwargs=template_kwargs(values),
        reasoning_effort=reasoning.effort,
        previous_response_id=values["previous_response_id"],
        store=values["store"] is not False,
        carries_reasoning=INCLUDE_REASONING in (values["include"] or []),
        settings=settings,
    )
    # Previous responses may add tools, which are not loaded yet.
    return request if request.previous_response_id else request.with_tools((), ignored)


SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling parameters that the response echoes; omitted ones have the served model's defaults."""
_ECHOED = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"),
    *SAMPLED,
    *("previous_response_id", "max_tool_calls"),
)
"""Fields that the response echoes as parsed."""
_FIXED = {"background": False, "service_tier": "default", "truncation": "disabled"}


def _logprobs(values: Mapping[str, Any], ignored: IgnoredFields) -> int | None:
    """Return the number of alternatives to report for each token, or None for no log-probabilities."""
    wanted = values["top_logprobs"] is not None and values["top_logprobs"] > 0
    for name in values["include"] or []:
        if name == INCLUDE_LOGPROBS:
            wanted = True
        elif name not in (*INCLUDES, INCLUDE_REASONING):
            ignored.add(f"include.{name}")
    return (values["top_logprobs"] or 0) if wanted else None


def _report_ignored(values: Mapping[str, Any], text: _Text, reasoning: _Reasoning, ignored: IgnoredFields) -> None:
    """Record the values that are accepted without effect."""
    for name, value, neutral in (
        ("truncation", values["truncation"], "disabled"),
        ("text.verbosity", text.verbosity, "medium"),
        ("reasoning.summary", reasoning.summary, "auto"),
        ("reasoning.generate_summary", reasoning.generate_summary, "auto"),
    ):
        if value not in (None, neutral):
            ignored.add(name)


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
    """Convert `text.format` to the `response_format` of a chat."""
    match text.format:
        case None | _Plain():
            return None
        case _JsonObject():
            return {"type": "json_object"}
        case wanted:
            return {"type": "json_schema", "json_schema": structs.asdict(wanted)}


def _tool_use(tools: ResponseTools, choice: Any, parallel: bool) -> ToolUse:
    """Combine the tools with `tool_choice`.

    Raises ApiError 400 if the chosen tool does not exist or is not supported.
    """
    if isinstance(choice, _Allowed):
        named = [tool for tool in choice.tools if tool.type in ("function", "custom")]
        if not named:
            raise unsupported("{param} allows only tools that this server does not have", "tool_choice")
        allowed = tuple(tools.model_name(tool.name, tool.namespace) for tool in named)
        return tool_use(tools.tools, RequestedChoice(choice.mode, allowed=allowed), parallel)
    if isinstance(choice, _Function | _Custom):
        name = tools.model_name(choice.name, choice.namespace)
        return tool_use(tools.tools, RequestedChoice("required", name=name), parallel)
    if choice == "required" and tools.hosted and not tools.tools:
        kinds = ", ".join([repr(kind[:40]) for kind in tools.hosted[:8]])
        raise unsupported(f"{{param}} requires a call, but this server does not have the tools {kinds}", "tool_choice")
    return tool_use(tools.tools, RequestedChoice(choice), parallel)
