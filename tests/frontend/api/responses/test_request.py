"""Parsing of the body of a response, field by field, and its description in `/openapi.json`."""

from typing import Any

import jsonschema
import msgspec
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from tandem.frontend.api.responses.input_items import parse_input
from tandem.frontend.api.responses.request import BODY, INCLUDES, ResponsesRequest, parse_responses
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.tools import ToolChoice
from tests.support.refusals import raises_api_error, refusal

BASE: dict[str, Any] = {"model": "m", "input": "hi"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "additionalProperties": False}
LOOK = {"type": "function", "name": "look", "parameters": SCHEMA}
ADD = {"type": "function", "name": "add", "strict": False}
SCHEMA_OF_BODY = BODY.schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA_OF_BODY)


def parse(**fields: Any) -> ResponsesRequest:
    return parse_responses(msgspec.json.encode({**BASE, **fields}), 1024, IgnoredFields(refuse=True))


def messages(**fields: Any) -> list[dict[str, Any]]:
    """Return the messages of a request's input."""
    found = parse(**fields)
    return found.conversation(found.input).messages


def refused(**fields: Any) -> ApiError:
    return refusal(parse, **fields)


def described(**fields: Any) -> bool:
    """Return true if the schema accepts this body."""
    return bool(VALIDATOR.is_valid({**BASE, **fields}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True), ("store", None), ("background", False), ("truncation", "disabled"), ("top_logprobs", 0),
        ("include", []), ("include", list(INCLUDES)), ("include", None), ("service_tier", "auto"),
        ("service_tier", "default"), ("tools", []), ("tool_choice", "auto"), ("tool_choice", None), ("metadata", {}),
        ("metadata", None), ("text", {}), ("text", {"format": {"type": "text"}, "verbosity": "medium"}),
        ("reasoning", {}), ("reasoning", {"effort": None, "summary": "auto"}), ("instructions", None),
        ("max_output_tokens", None), ("stream_options", None), ("priority", 0),
        ("session_id", None), ("cache_salt", None), ("prompt_cache_retention", "24h"),
        ("chat_template_kwargs", {}), ("parallel_tool_calls", True), ("temperature", None), ("user", None),
        ("n", 1), ("best_of", 1), ("return_token_ids", False), ("stream_format", None),
        ("response_format", {"type": "text"}),
    ],
)  # fmt: skip
def test_responses_accepts_values_that_change_nothing(name: str, value: Any) -> None:
    assert parse(**{name: value}) == parse()
    assert described(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "status", "param"),
    [
        ("store", "yes", 400, "store"), ("previous_response_id", "", 400, "previous_response_id"),
        ("conversation", "conv_1", 400, "conversation"), ("background", True, 400, "background"),
        ("prompt", {"id": "pmpt_1"}, 400, "prompt"), ("priority", 101, 400, "priority"),
        ("session_id", "", 400, "session_id"), ("session_id", 3, 400, "session_id"),
        ("cache_salt", "", 400, "cache_salt"), ("truncation", "auto", 400, "truncation"),
        ("max_tool_calls", 0, 400, "max_tool_calls"), ("top_logprobs", 21, 400, "top_logprobs"),
        ("include", ["surprise"], 400, "include.surprise"), ("include", "x", 400, "include"),
        ("context_management", [{"type": "compaction"}], 400, "context_management"),
        ("moderation", {"model": "m"}, 400, "moderation"), ("n", 2, 400, "n"), ("messages", [], 400, "messages"),
        ("response_format", {"type": "json_object"}, 400, "response_format"), ("best_of", 2, 400, "best_of"),
        ("max_tokens", 5, 400, "max_tokens"),
        ("stream_format", "events", 400, "stream_format"), ("return_token_ids", True, 400, "return_token_ids"),
        ("max_output_tokens", 0, 400, "max_output_tokens"), ("max_output_tokens", "x", 400, "max_output_tokens"),
        ("text", {"verbosity": "low"}, 400, "text.verbosity"), ("text", {"more": 1}, 400, "text.more"),
        ("text", {"format": {"type": "xml"}}, 400, "text.format.type"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, 400, "text.format"),
        ("text", {"format": {"type": "json_schema", "name": "", "schema": {}}}, 400, "text.format.name"),
        ("reasoning", {"effort": "most"}, 400, "reasoning.effort"),
        ("reasoning", {"summary": "detailed"}, 400, "reasoning.summary"),
        ("tools", [{"type": "web_search"}], 400, "tools[0].type"),
        ("tools", [{"type": "function"}], 400, "tools[0]"),
        ("tools", [LOOK, LOOK], 400, "tools[1].name"), ("tools", [{**LOOK, "name": ""}], 400, "tools[0].name"),
        ("tool_choice", "required", 400, "tool_choice"), ("tool_choice", {"type": "mcp"}, 400, "tool_choice.type"),
        ("metadata", {"a": 1}, 400, "metadata[...]"), ("metadata", {str(i): "" for i in range(17)}, 400, "metadata"),
        ("metadata", {"k" * 65: ""}, 400, "metadata"), ("metadata", {"k": "v" * 513}, 400, "metadata"),
        ("user", 3, 400, "user"), ("instructions", ["x"], 400, "instructions"), ("surprise", 1, 400, "surprise"),
        ("chat_template_kwargs", {"messages": 1}, 400, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
def test_responses_rejects_unsupported_values_by_name(name: str, value: Any, status: int, param: str) -> None:
    error = refused(**{name: value})
    assert (error.status, error.param) == (status, param)


def test_schema_of_responses_matches_the_parser() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA_OF_BODY)
    assert set(BASE) - {"model"} == set(SCHEMA_OF_BODY["required"])
    assert not any(described(**fields) for fields in ({"n": 2}, {"best_of": 2}, {"return_token_ids": True}))
    wrong: list[dict[str, Any]] = [
        {"store": 1}, {"tools": [{}]}, {"input": []}, {"include": [1]}, {"tools": [{"type": "custom"}]},
    ]  # fmt: skip
    assert not any(described(**fields) for fields in wrong)
    taken: list[dict[str, Any]] = [
        {"tools": [LOOK, ADD], "tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 5},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
        {"input": CONVERSATION},
    ]
    for fields in taken:
        assert described(**fields)
        parse(**fields)


def test_every_responses_field_of_the_official_client_is_known() -> None:
    """Check that each field is honoured, accepted with neutral values, or rejected as known."""
    unknown = refused(unheard="of")
    for name in set(ResponseCreateParamsBase.__annotations__) - {"prompt_cache_options", "prompt_cache_retention"}:
        error = refused(**{name: [{"unheard": "of"}]})
        assert (error.template, error.param) != (unknown.template, name)


def test_response_settings_repeat_the_request() -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA, "description": None, "strict": True}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    given = {
        "instructions": "be short", "max_output_tokens": 7, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "temperature": 0.5, "top_p": 0.25, "text": {"format": wanted, "verbosity": "medium"}, "user": "me",
        "safety_identifier": "s", "prompt_cache_key": "p", "tool_choice": allowed, "presence_penalty": 1.0,
    }  # fmt: skip
    settings = parse(**given, tools=[LOOK, ADD], reasoning={"effort": "low"}).settings
    assert {name: settings[name] for name in given} == given
    assert settings["reasoning"] == {"effort": "low", "summary": None}
    assert settings["tools"] == [
        {**LOOK, "description": None, "strict": True},
        {**ADD, "description": None, "parameters": None},
    ]
    assert (settings["background"], settings["truncation"]) == (False, "disabled")
    plain = parse().settings
    assert (plain["tool_choice"], plain["text"]["format"], plain["metadata"]) == ("auto", {"type": "text"}, {})


@pytest.mark.parametrize(
    ("tool", "strict"),
    [
        ({**LOOK, "strict": True}, True), ({**LOOK, "strict": False}, False), (LOOK, True),
        ({**LOOK, "strict": None}, True),
        ({**LOOK, "parameters": None}, False), ({**LOOK, "parameters": {"not": {"type": "object"}}}, False),
    ],
)  # fmt: skip
def test_tools_are_strict_by_default_if_their_schema_is_supported(tool: dict[str, Any], strict: bool) -> None:
    assert parse(tools=[tool]).tool_use.tools[0].strict is strict


def test_responses_tool_choice_selects_mode_and_tools() -> None:
    def chosen(choice: Any) -> tuple[list[str], ToolChoice]:
        use = parse(tools=[LOOK, ADD], tool_choice=choice).tool_use
        return [tool.name for tool in use.tools], use.choice

    assert chosen("none") == (["look", "add"], ToolChoice("none"))
    assert chosen("required") == (["look", "add"], ToolChoice("required"))
    assert chosen({"type": "function", "name": "add"}) == (["look", "add"], ToolChoice("required", "add"))
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    assert chosen(allowed) == (["add"], ToolChoice("auto"))
    assert parse(tools=[LOOK], tool_choice="none").tool_use.template_tools == ()


def test_text_format_becomes_a_response_format() -> None:
    assert parse().options.response_format is None
    assert parse(text={"format": {"type": "json_object"}}).options.response_format == {"type": "json_object"}
    schema = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    found = parse(text={"format": schema}).options.response_format
    assert found is not None
    assert found["json_schema"]["schema"] == SCHEMA


CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be short."},
    {"type": "message", "role": "user",
     "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
     "content": [{"type": "reasoning_text", "text": "hm"}], "status": "completed"},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
     "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 1}',
     "status": "completed"},
    {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "broken"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "again"}]},
    {"type": "function_call", "call_id": "c3", "name": "look", "arguments": ""},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
]  # fmt: skip


def calls(*made: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"id": c, "type": "function", "function": {"name": "look", "arguments": a}} for c, a in made]


def test_input_items_become_messages() -> None:
    assert messages(input=CONVERSATION, instructions="You help.") == [
        {"role": "system", "content": "You help."},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": calls(("c1", {"at": 1}), ("c2", "broken")),
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "sun", "tool_call_id": "c2"},
        {"role": "assistant", "reasoning_content": "again", "tool_calls": calls(("c3", {}))},
        {"role": "assistant", "content": "No."},
    ]
    assert messages(input="x") == [{"role": "user", "content": "x"}]
    assert messages(input=CONVERSATION[2:3]) == [{"role": "assistant", "reasoning_content": "hm"}]


@pytest.mark.parametrize(
    ("given", "status", "param"),
    [
        (None, 400, "input"), ([], 400, "input"), (3, 400, "input"), ({}, 400, "input"), (["x"], 400, "input[0]"),
        ([{}], 400, "input[0]"), ([{"role": "user"}], 400, "input[0]"),
        ([{"role": "tool", "content": "x"}], 400, "input[0].role"),
        ([{"type": "item_reference"}], 400, "input[0]"),
        ([{"type": "computer_call_output"}], 400, "input[0].type"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_image"}]}], 400,
         "input[1].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], 400, "input[0].content[0]"),
        ([{"role": "user", "content": "x", "more": 1}], 400, "input[0].more"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], 400, "input[0]"),
        ([{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}], 400,
         "input[0].output[0].type"),
        ([{"type": 3}], 400, "input[0].type"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_with_its_path(given: Any, status: int, param: str) -> None:
    error = refused(input=given)
    assert (error.status, error.param) == (status, param)


def test_number_of_input_items_is_bounded_before_decoding() -> None:
    for items, many in (([{"role": "user", "content": "x"}], 9000), ([0], 20_000)):
        with raises_api_error(400, "invalid_value", "input"):
            parse_input(msgspec.Raw(msgspec.json.encode(items * many)), IgnoredFields())


def test_responses_reads_scheduling_fields() -> None:
    fields = {"priority": -7, "session_id": "talk", "cache_salt": "pepper"}
    options = parse(**fields).options
    assert (options.priority, options.session_id, options.cache_salt) == (-7, "talk", "pepper")
    assert described(**fields)
