"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from tandem.frontend.api.messages.conversation import MESSAGES, SYSTEM, parse_messages, parse_system
from tandem.frontend.api.messages.tools import TOOLS, GivenTools, ToolChoiceBlock, messages_tool_use, parse_tools
from tandem.frontend.request.conversation import TEMPLATE_KWARGS_FIELD, Conversation, template_kwargs
from tandem.frontend.request.extra_fields import ANTHROPIC_FIELDS, SINGLE_ANSWER, SINGLE_ANSWER_FIELDS
from tandem.frontend.request.field_types import Ignored, Integer, Parsed, String, Strings, Typed, Unsupported
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import (
    INT32_MAX,
    MAX_STOP_CHARS,
    MAX_STOPS,
    OPTION_FIELDS,
    GenerationOptions,
    generation_options,
)
from tandem.frontend.request.tools import ToolUse

NOT_HERE = ("store",)
"""Shared options that messages do not have."""

_EFFORTS = {"max": "xhigh"}
"""Maps Anthropic's effort to `reasoning_effort` of a chat, where the values differ."""

NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
}
"""Maps chat fields to fields of these routes."""


class MessagesRequest(Struct, frozen=True):
    """Validated request to `/v1/messages`."""

    options: GenerationOptions
    prompt: "PromptRequest"
    hide_thinking: bool
    """True to omit the text of thinking blocks (`thinking.display`)."""


class PromptRequest(Struct, frozen=True):
    """Part of a request that determines its prompt.

    `/v1/messages/count_tokens` takes only this part.
    """

    model: str
    conversation: Conversation
    tool_use: ToolUse
    output_schema: dict[str, Any] | None
    """JSON Schema of the output; None for text."""


_Display = Literal["summarized", "omitted"] | None


class _Enabled(Struct, tag_field="type", tag="enabled"):
    budget_tokens: int | None = None
    display: _Display = None


class _Adaptive(Struct, tag_field="type", tag="adaptive"):
    display: _Display = None


class _Disabled(Struct, tag_field="type", tag="disabled"):
    display: _Display = None


_Thinking = _Enabled | _Adaptive | _Disabled


class _JsonSchema(Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: Annotated[str, Meta(min_length=1)] | None = None


class _OutputConfig(Struct):
    effort: str | None = None
    format: _JsonSchema | None = None


_PROMPT_FIELDS = (
    Field("model", String(), "A name of the served model.", required=True),
    Field("messages", Parsed(parse_messages, MESSAGES), "The conversation so far.", required=True),
    Field("system", Parsed(parse_system, SYSTEM), "The system prompt."),
    Field("tools", Parsed(parse_tools, TOOLS), "Tools that the model may call."),
    Field("tool_choice", Typed(ToolChoiceBlock), "Whether the model may or must call a tool, and which."),
    Field("thinking", Typed(_Thinking), "Whether the model reasons before it answers."),
    Field("output_config", Typed(_OutputConfig), "The JSON Schema of the output, and how much effort to make."),
    Field("output_format", Typed(_JsonSchema), "The older name of `output_config.format`."),
    TEMPLATE_KWARGS_FIELD,
    Field("mcp_servers", Unsupported(([],)), "No tools run in this server."),
    Field("thread", Unsupported(), "No state of conversations is kept; send all messages."),
    Field("compaction", Unsupported(), "No conversation is summarized."),
    *ANTHROPIC_FIELDS,
)
_GENERATION_FIELDS = (
    Field("max_tokens", Integer(1, INT32_MAX), "At most this many; fewer if the context has less room.", required=True),
    Field("stop_sequences", Strings(MAX_STOPS, MAX_STOP_CHARS), "Strings that end the output after thinking."),
    Field("stop", Unsupported(([],)), "`stop_sequences` takes them."),
    Field("response_format", Unsupported(({"type": "text"},)), "`output_config.format` takes a JSON schema."),
    Field("stream_options", Ignored(), "The last events of a stream have the usage."),
    *SINGLE_ANSWER_FIELDS,
)
_OWN_NAMES = {field.name for field in (*_PROMPT_FIELDS, *_GENERATION_FIELDS)}
BODY = BodyFormat(
    (
        *(field for field in OPTION_FIELDS if field.name not in {*NOT_HERE, *_OWN_NAMES}),
        *_PROMPT_FIELDS,
        *_GENERATION_FIELDS,
    )
)
COUNT_BODY = BodyFormat(_PROMPT_FIELDS)


def parse_message_request(body: bytes, ignored: IgnoredFields) -> MessagesRequest:
    """Parse the body of `/v1/messages`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    values = BODY.read(body, ignored)
    prompt = _prompt(values, ignored)
    # The field is required, so clients may exceed the context: it is lowered like a default.
    given = {**values, **SINGLE_ANSWER, "stop": values["stop_sequences"]}
    options = generation_options(given, None, values["max_tokens"], None, ignored)
    if prompt.output_schema is not None:
        wanted = {"name": "output", "schema": prompt.output_schema, "strict": True}
        options = structs.replace(options, response_format={"type": "json_schema", "json_schema": wanted})
    hidden = values["thinking"] is not None and values["thinking"].display == "omitted"
    return MessagesRequest(options, prompt, hidden)


def parse_count_request(body: bytes, ignored: IgnoredFields) -> PromptRequest:
    """Parse the body of `/v1/messages/count_tokens`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    return _prompt(COUNT_BODY.read(body, ignored), ignored)


def _prompt(values: Mapping[str, Any], ignored: IgnoredFields) -> PromptRequest:
    use = messages_tool_use(values["tools"] or GivenTools(), values["tool_choice"], ignored)
    if isinstance(values["thinking"], _Enabled):
        # A budget cannot be enforced: the model ends its reasoning itself.
        ignored.add("thinking.budget_tokens")
    output: _OutputConfig = values["output_config"] or _OutputConfig()
    output_format = output.format or values["output_format"]
    system = [{"role": "system", "content": values["system"]}] if values["system"] else []
    # A final message of the assistant is the start of the answer.
    continues = values["messages"][-1]["role"] == "assistant"
    kwargs, given = template_kwargs(values), values["thinking"]
    conversation = Conversation(
        messages=[*system, *values["messages"]],
        tools=use.template_tools,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=kwargs,
        reasoning_effort=_EFFORTS.get(output.effort or "", output.effort),
        effort_field="output_config.effort",
        effort_switches=False,
        # A template variable takes precedence over the field for it.
        thinking=None if given is None or "enable_thinking" in kwargs else not isinstance(given, _Disabled),
        thinking_field="thinking",
    )
    schema = None if output_format is None else output_format.schema
    return PromptRequest(values["model"], conversation, use, schema)
