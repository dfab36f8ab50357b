"""Fields of a chat under the names and with the values of other servers and of OpenAI's older interface."""

from typing import Any

import msgspec
import pytest
from msgspec import structs

from tandem.frontend.request.tools import ToolChoice
from tests.support.chat_bodies import ADD, LOOK, USER, described, parse, refused, tolerant


@pytest.mark.parametrize(
    ("fields", "thinking", "field", "effort"),
    [
        ({}, None, "enable_thinking", None), ({"enable_thinking": False}, False, "enable_thinking", None),
        ({"think": True}, True, "think", None), ({"thinking": {"type": "disabled"}}, False, "thinking", None),
        ({"thinking": {"type": "enabled"}}, True, "thinking", None), ({"thinking": True}, True, "thinking", None),
        ({"thinking": {"type": "adaptive"}}, None, "enable_thinking", None),
        ({"reasoning": {"enabled": False}}, False, "reasoning.enabled", None),
        ({"reasoning": {"effort": "low"}}, None, "enable_thinking", "low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "none"}, None, "enable_thinking", "none"),
    ],
)  # fmt: skip
def test_every_name_of_thinking_reaches_the_conversation(
    fields: dict[str, Any], thinking: bool | None, field: str, effort: str | None
) -> None:
    found = parse(**fields).conversation
    assert (found.thinking, found.thinking_field, found.reasoning_effort) == (thinking, field, effort)
    assert described(**fields)


def test_functions_are_tools_in_their_old_form() -> None:
    use = parse(functions=[LOOK["function"]], function_call="auto").tool_use
    (tool,) = parse(tools=[LOOK]).tool_use.tools
    assert use.tools == (structs.replace(tool, path="functions[0].parameters"),)
    assert use.choice == ToolChoice("auto")
    assert (use.as_functions, use.parallel) == (True, False)
    assert parse(functions=[ADD["function"]], function_call={"name": "add"}).tool_use.choice == ToolChoice(
        "required", "add"
    )
    assert not parse(functions=[ADD["function"]], function_call="none").tool_use.active
    assert refused(functions=[ADD["function"]], function_call={"name": "x"}).param == "function_call"
    assert refused(functions=[{"name": "a b"}]).param == "functions[0].name"
    assert not parse(tools=[LOOK], functions=[ADD["function"]]).tool_use.as_functions


def test_function_calls_and_their_results_are_paired() -> None:
    call = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    result = {"role": "function", "name": "look", "content": "3"}
    *_, first, answer, second, other = parse(messages=[USER, call, result, call, result]).conversation.messages
    for asked, said in ((first, answer), (second, other)):
        assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}
        assert (said["role"], said["tool_call_id"]) == ("tool", asked["tool_calls"][0]["id"])
        assert len(said["tool_call_id"]) == 9
    assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]


@pytest.mark.parametrize("name", ["a.b", "mcp:server/tool", "x" * 256])
def test_tools_may_have_the_names_of_mcp_servers(name: str) -> None:
    tool = {"function": {"name": name, "description": "x" * 300_000}}
    assert parse(tools=[tool]).tool_use.tools[0].name == name
    assert parse(tools=[tool], tool_choice="any").tool_use.choice == ToolChoice("required")
    assert described(tools=[tool], tool_choice="any")


SCHEMA = {"type": "object", "properties": {}}
AS_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"guided_json": SCHEMA}, "response_format", AS_FORMAT),
        ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, "response_format", AS_FORMAT),
        ({"structured_outputs": {"json": SCHEMA}}, "response_format", AS_FORMAT),
        ({"structured_outputs": {"json_object": True}}, "response_format", {"type": "json_object"}),
        ({"guided_regex": "a+"}, "regex", "a+"), ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", AS_FORMAT),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", AS_FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format", AS_FORMAT),
    ],
)  # fmt: skip
def test_constraints_have_the_names_of_other_servers(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(parse(**fields).options, name) == value
    assert described(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"choice": []}, "choice"),
    ],
)
def test_invalid_constraints_are_rejected_by_the_name_that_was_sent(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_response_format_records_unknown_names() -> None:
    schema = {"name": "x", "schema": SCHEMA, "note": 1}
    parsed, ignored = tolerant(response_format={"type": "json_schema", "json_schema": schema, "more": 2})
    assert ignored == ("response_format.json_schema.note", "response_format.more")
    assert parsed.options.response_format == {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_values_of_other_servers_have_their_meaning() -> None:
    assert parse(seed=-1).options.seed is None
    greedy = parse(top_p=0, temperature=1.5).options.sampling
    assert (greedy.temperature, greedy.top_p) == (0, 1)
    assert parse(stop="").options.stop == ()
    assert parse(stop=["", "a"]).options.stop == ("a",)
    assert parse(repeat_penalty=1.3).options.sampling.repetition_penalty == 1.3
    assert parse(repeat_penalty=1.3, repetition_penalty=1.2).options.sampling.repetition_penalty == 1.2
    assert tolerant(stream_options={"include_usage": True})[1] == ("stream_options",)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert parse(stream=True, stream_options=usage).options.continuous_usage
    assert not parse(stream=True, stream_options={"continuous_usage_stats": True}).options.continuous_usage
