"""Parsing of the body of a message, field by field, and its description in `/openapi.json`."""

from typing import Any

import jsonschema
import msgspec
import pytest

from tandem.frontend.api.messages.conversation import BILLING_PREFIX, parse_messages, parse_system
from tandem.frontend.api.messages.errors import anthropic_status
from tandem.frontend.api.messages.request import (
    BODY,
    COUNT_BODY,
    MessagesRequest,
    parse_count_request,
    parse_message_request,
)
from tandem.frontend.api.messages.tools import parse_tools
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.tools import ToolChoice
from tests.support.refusals import raises_api_error, refusal

BASE: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "additionalProperties": False}
LOOK = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
ADD = {"type": "custom", "name": "add", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA_OF_BODY = BODY.schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA_OF_BODY)


def parse(**fields: Any) -> MessagesRequest:
    return parse_message_request(msgspec.json.encode({**BASE, **fields}), IgnoredFields())


def ignored_in(**fields: Any) -> tuple[str, ...]:
    ignored = IgnoredFields()
    parse_message_request(msgspec.json.encode({**BASE, **fields}), ignored)
    return ignored.paths


def refused(**fields: Any) -> ApiError:
    return refusal(parse, **fields)


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **CACHED} for text in texts]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system", ""), ("system", []), ("system", None), ("stop_sequences", []), ("stream", False), ("tools", []),
        ("tools", None), ("tool_choice", {"type": "auto"}), ("tool_choice", {"type": "none"}), ("top_k", None),
        ("metadata", {"user_id": "me"}), ("service_tier", "auto"), ("cache_control", {"type": "ephemeral"}),
        ("thinking", None), ("output_config", {}), ("output_config", None), ("mcp_servers", []),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}), ("container", None),
        ("n", 1), ("best_of", 1), ("stop", None), ("return_token_ids", False), ("response_format", {"type": "text"}),
    ],
)  # fmt: skip
def test_message_accepts_values_that_change_nothing(name: str, value: Any) -> None:
    assert parse(**{name: value}) == parse()
    assert VALIDATOR.is_valid({**BASE, name: value})


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("max_tokens", None, "max_tokens"), ("max_tokens", 0, "max_tokens"), ("max_tokens", "x", "max_tokens"),
        ("model", None, "model"), ("messages", None, "messages"), ("messages", [], "messages"),
        ("system", 3, "system"), ("system", [{"type": "image"}], "system[0].type"),
        ("stop_sequences", 3, "stop_sequences"), ("temperature", 3, "temperature"), ("top_p", -1, "top_p"),
        ("tools", [{"name": "look"}], "tools[0]"), ("tools", [{**LOOK, "name": "a b"}], "tools[0].name"),
        ("tools", [LOOK, LOOK], "tools[1].name"), ("tools", {}, "tools"), ("tools", [3], "tools[0]"),
        ("tool_choice", {"type": "any"}, "tool_choice"), ("tool_choice", "auto", "tool_choice"),
        ("tool_choice", {"type": "mcp"}, "tool_choice.type"), ("tool_choice", {"type": "tool"}, "tool_choice"),
        ("thinking", {"type": "always"}, "thinking.type"), ("thinking", True, "thinking"),
        ("output_config", {"format": {"type": "json_schema"}}, "output_config.format"),
        ("output_config", {"format": {"type": "xml"}}, "output_config.format.type"),
        ("mcp_servers", [{"type": "url"}], "mcp_servers"), ("thread", {"type": "create"}, "thread"),
        ("compaction", {"type": "summary"}, "compaction"), ("n", 2, "n"), ("best_of", 2, "best_of"),
        ("stop", ["x"], "stop"), ("response_format", {"type": "json_object"}, "response_format"),
        ("return_token_ids", True, "return_token_ids"), ("stream_format", "events", "stream_format"),
        ("chat_template_kwargs", {"messages": 1}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
def test_message_rejects_unsupported_values_by_name(name: str, value: Any, param: str) -> None:
    error = refused(**{name: value})
    assert (anthropic_status(error.status, error.code), error.param) == (400, param)


def test_every_message_field_of_the_official_client_is_known() -> None:
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsBase

    # The client sends these two as headers.
    wanted = set(MessageCreateParamsBase.__annotations__) - {"user_profile_id", "workspace_id"}
    assert wanted <= {field.name for field in BODY.fields} | {"stream"}
    assert set(MessageCountTokensParams.__annotations__) - {"user_profile_id", "workspace_id"} <= {
        field.name for field in COUNT_BODY.fields
    }


def test_schema_of_messages_matches_the_parser() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA_OF_BODY)
    assert set(SCHEMA_OF_BODY["required"]) == set(BASE)
    wrong: list[dict[str, Any]] = [{"messages": []}, {"max_tokens": 0}, {"tools": [{}, 3]}, {"thinking": {"type": "x"}}]
    assert not any(VALIDATOR.is_valid({**BASE, **fields}) for fields in wrong)
    taken: list[dict[str, Any]] = [
        {"messages": CONVERSATION, "system": text("a"), "tools": [LOOK, ADD, SEARCH]},
        {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 2048}, "stream": True},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"}},
    ]
    for fields in taken:
        assert VALIDATOR.is_valid({**BASE, **fields}), fields
        parse(**fields)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": text("a", "b")},
    {"role": "user", "content": "c"},
    {"role": "system", "content": text("Be quick.")},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "redacted_thinking", "data": "xyz"},
        *text("I look."),
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}, **CACHED},
        {"type": "tool_use", "id": "t2", "name": "look", "input": {}, "caller": {"type": "direct"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "rain", **CACHED},
        {"type": "tool_result", "tool_use_id": "t2", "content": text("no", "sun"), "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        *text("Well?"),
    ]},
    {"role": "assistant", "content": "It"},
    {"role": "assistant", "content": "rains."},
    {"role": "user", "content": []},
]  # fmt: skip


def call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_content_blocks_become_messages() -> None:
    system = text("You help.", f"{BILLING_PREFIX} x=1;", "Well.")
    assert parse(messages=CONVERSATION, system=system).prompt.conversation.messages == [
        {"role": "system", "content": "You help.\nWell."},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "system", "content": "Be quick."},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": [call("t1", {"at": 1}), call("t2", {})],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: no\nsun", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It\nrains."},
        {"role": "user", "content": ""},
    ]  # fmt: skip


def test_a_last_assistant_message_is_continued() -> None:
    conversation = parse(
        messages=[*BASE["messages"], {"role": "assistant", "content": "The answer is"}]
    ).prompt.conversation
    assert (conversation.continue_final_message, conversation.add_generation_prompt) == (True, False)
    fresh = parse().prompt.conversation
    assert (fresh.continue_final_message, fresh.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("content", "role", "param"),
    [
        ([{"type": "image", "source": {"type": "url", "url": "x"}}], "user", "messages[0].content[0].type"),
        ([*text("a"), {"type": "image", "source": {"data": "x" * 300_000}}], "user", "messages[0].content[1].type"),
        ([{"type": "document"}], "user", "messages[0].content[0].type"),
        ([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}], "user",
         "messages[0].content[0].content[0].type"),
        ([{"type": "tool_use", "id": "t", "name": "look", "input": {}}], "user", "messages[0].content[0].type"),
        ([{"type": "server_tool_use"}], "assistant", "messages[0].content[0].type"),
        ([{"type": "tool_use", "id": "t", "name": "look"}], "assistant", "messages[0].content[0]"),
        ([{"type": "tool_use", "id": "t", "name": "look", "input": {}}], "assistant", "messages"),
        ([{"type": "tool_result"}], "user", "messages[0].content[0]"), ([{}], "user", "messages[0].content[0]"),
        (None, "user", "messages[0].content"), (3, "user", "messages[0].content"), ("x", "tool", "messages[0].role"),
        ([3], "user", "messages[0].content[0]"), ([{"type": 3}], "user", "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_invalid_content_is_rejected_with_its_path(content: Any, role: str, param: str) -> None:
    error = refused(messages=[{"role": role, "content": content}])
    assert (anthropic_status(error.status, error.code), error.param) == (400, param)


def test_number_of_messages_is_bounded_before_decoding() -> None:
    for part, many in (('{"role": "user", "content": ""}', 9000), ('{"type": 0}', 20_000)):
        with raises_api_error(400, "invalid_value", "messages"):
            parse_messages(msgspec.Raw(f"[{','.join([part] * many)}]".encode()), IgnoredFields())


def test_number_of_tools_and_of_system_blocks_is_bounded_before_decoding() -> None:
    for parse_field, param, part, many in (
        (parse_tools, "tools", '{"name": "a"}', 70_000),
        (parse_system, "system", '{"type": "text", "text": ""}', 20_000),
    ):
        with raises_api_error(400, "invalid_value", param):
            parse_field(msgspec.Raw(f"[{','.join([part] * many)}]".encode()), IgnoredFields())
    with pytest.raises(ApiError, match=r"tools\[0\]|a part of its"):
        parse_tools(msgspec.Raw(b"[" + b"[]," * 200_000 + b"[]]"), IgnoredFields())


def test_tools_are_functions_and_not_strict_by_default() -> None:
    use = parse(tools=[{**LOOK, "strict": True}, ADD]).prompt.tool_use
    assert [(tool.name, tool.parameters, tool.strict) for tool in use.tools] == [
        ("look", SCHEMA, True), ("add", {"type": "object"}, False),
    ]  # fmt: skip
    assert use.template_tools[0]["function"]["description"] == "Look."


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice("auto"), True), ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "any"}, ToolChoice("required"), True), ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "add"}, ToolChoice("required", "add"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice("required"), True),
    ],
)  # fmt: skip
def test_tool_choice_of_messages_selects_the_mode(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    use = parse(tools=[LOOK, ADD], tool_choice=choice).prompt.tool_use
    assert (use.choice, use.parallel) == (expected, parallel)


def test_server_tools_are_dropped_unless_they_are_forced() -> None:
    for choice in (None, {"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "look"}):
        use = parse(tools=[SEARCH, LOOK], tool_choice=choice).prompt.tool_use
        assert [tool.name for tool in use.tools] == ["look"]
    assert parse(tools=[SEARCH]).prompt.tool_use.tools == ()
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        error = refused(tools=[SEARCH, LOOK], tool_choice=choice)
        assert (error.param, "'web_search_20250305'" in error.message) == ("tool_choice", True)


@pytest.mark.parametrize(
    ("thinking", "wanted", "hidden"),
    [
        (None, None, False), ({"type": "enabled", "budget_tokens": 2048}, True, False),
        ({"type": "adaptive", "display": "omitted"}, True, True),
        ({"type": "adaptive", "display": "summarized"}, True, False),
        ({"type": "disabled"}, False, False),
    ],
)  # fmt: skip
def test_thinking_says_whether_the_model_reasons(thinking: Any, wanted: bool | None, hidden: bool) -> None:
    parsed = parse(thinking=thinking)
    assert (parsed.prompt.conversation.thinking, parsed.hide_thinking) == (wanted, hidden)


def test_template_variables_of_a_request_come_before_its_thinking() -> None:
    fields = {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False, "mood": "calm"}}
    found = parse(**fields).prompt.conversation
    assert (found.template_kwargs, found.thinking) == ({"enable_thinking": False, "mood": "calm"}, None)


def test_what_has_no_effect_is_named() -> None:
    assert ignored_in(messages=CONVERSATION, system=text("x"), tools=[LOOK, ADD]) == ()
    assert ignored_in(cache_control=CACHED["cache_control"]) == ("cache_control",)
    told = {
        "context_management": {"edits": []}, "surprise": 1, "tools": [SEARCH, {**LOOK, "defer_loading": True}],
        "thinking": {"type": "enabled", "budget_tokens": 2048}, "service_tier": "auto",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}], "id": "m1"}],
    }  # fmt: skip
    assert sorted(ignored_in(**told)) == [
        "context_management", "messages[].content[].mood", "messages[].id", "surprise", "thinking.budget_tokens",
        "tools[].defer_loading", "tools[].web_search_20250305",
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    {"output_format": {"type": "json_schema", "schema": SCHEMA, "name": "x"}},
])  # fmt: skip
def test_output_format_of_messages_is_a_strict_schema(fields: dict[str, Any]) -> None:
    found = parse(**fields).options.response_format
    assert found is not None
    assert (found["json_schema"]["schema"], found["json_schema"]["strict"]) == (SCHEMA, True)
    assert parse().options.response_format is None


def test_message_options_are_those_of_generation() -> None:
    options = parse(
        max_tokens=7, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["END"], stream=True, session_id="talk"
    ).options
    assert (options.max_tokens, options.max_tokens_by_default, options.stop) == (7, True, ("END",))
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (options.stream, options.session_id, options.n) == (True, "talk", 1)


@pytest.mark.parametrize(("effort", "read"), [("low", "low"), ("xhigh", "xhigh"), ("max", "xhigh"), (None, None)])
def test_effort_has_the_words_of_templates(effort: str | None, read: str | None) -> None:
    assert parse(output_config={"effort": effort}).prompt.conversation.reasoning_effort == read


def test_counting_takes_the_fields_of_the_prompt() -> None:
    fields = {"messages": CONVERSATION, "system": "x", "tools": [LOOK], "thinking": {"type": "disabled"}}
    counted = parse_count_request(msgspec.json.encode({"model": "m", **fields}), IgnoredFields())
    assert counted == parse(**fields).prompt
