"""Grammars of calls written as XML, and the arguments that the parser reads from what they allow."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.message import join_deltas
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.grammar.grammar import output_grammar
from tandem.frontend.grammar.tool_calls import QWEN3_CODER, tool_grammar
from tandem.frontend.grammar.xml_calls import unenforced
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse
from tests.support.byte_grammar import verdict

SPECIAL = {"<tool_call>": 401, "</tool_call>": 402}
NODE = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "node": {"$ref": "#/$defs/node"},
        "flag": {"type": "boolean"},
        "few": {"type": "string", "minLength": 2, "maxLength": 4},
        "shape": {"type": "string", "pattern": "^a.c$"},
        "found": {"type": "string", "pattern": "b+"},
        "mixed": {"enum": ["x", 1, None]},
        "counted": {"type": ["integer", "null"]},
        "listed": {"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string"}}]},
        "number": {"type": "number"},
    },
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string"}, "node": NODE},
}
STRICT = Tool("weather", SCHEMA, True, {})
LOOSE = Tool("clock", {"properties": {"zone": {"type": "integer"}}, "additionalProperties": True}, False, {})
ANY = Tool("any", None, False, {})
EMPTY = Tool("ping", None, True, {})


def use(*tools: Tool, mode: Any = "required", name: str | None = None, parallel: bool = True) -> ToolUse:
    return ToolUse(tools, ToolChoice(mode, name), parallel)


def grammar(tool_use: ToolUse, special: dict[str, int] | None = None, as_schemas: bool = False) -> str:
    found = tool_grammar(tool_use, QWEN3_CODER, special or {}, as_schemas=as_schemas)
    assert found is not None
    return found.text


def written(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{QWEN3_CODER.written(name, arguments)}\n</tool_call>"


@pytest.mark.parametrize("as_schemas", [False, True])
@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_values_follow_the_schema_of_their_parameter(special: dict[str, int], as_schemas: bool) -> None:
    text = grammar(use(STRICT, LOOSE, EMPTY), special, as_schemas)
    for arguments in (
        {},
        {"place": ""},
        {"place": "two\n\nlines <b> </parameter> b </function>\n"},
        {"unit": "F", "days": 3},
        {"maybe": None},
        {"maybe": "text"},
        {"node": {"x": 1, "next": {"x": 2.5}}},
        {"flag": True},
        {"few": "abc"},
        {"shape": "abc"},
        {"found": "a\nbb c"},
        {"mixed": "x"},
        {"mixed": 1},
        {"mixed": None},
        {"counted": None},
        {"counted": 4},
        {"listed": "all"},
        {"listed": ["a"]},
        {"number": -1.5e3},
    ):
        assert verdict(text, written("weather", **{"place": "Köln", **arguments}), special) == "whole", arguments
    for arguments in (
        {"place": "ended</parameter> </function>"},
        {"place": "ended</function>\n</tool_call>"},
        {"unit": "K"},
        {"days": "x"},
        {"days": 0},
        {"node": {"next": {"x": 1}}},
        {"node": {"x": 1, "next": {"x": "a"}}},
        {"flag": "True"},
        {"few": "abcde"},
        {"few": "a"},
        {"shape": "abd"},
        {"shape": "abcd"},
        {"found": "a"},
        {"mixed": 2},
        {"counted": "x"},
        {"listed": "some"},
        {"listed": [1]},
        {"number": "a"},
        {"other": "x"},
    ):
        assert verdict(text, written("weather", **{"place": "Köln", **arguments}), special) == "wrong", arguments


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_required_calls_follow_their_format(special: dict[str, int]) -> None:
    text = grammar(use(STRICT, LOOSE, ANY, EMPTY), special)
    good = written("weather", place="Köln")
    for calls in (
        good,
        f"{good}\n{written('ping')}\n{good}",
        written("clock", zone=1, more="two\nlines", third=[1]),
        written("clock"),
        written("any", one="x", two="y"),
        written("any"),
    ):
        assert verdict(text, calls, special) == "whole", calls
    for wrong in (
        written("weather"),
        written("weather", unit="C", place="Köln"),
        written("weather", place="Köln").replace("<function=weather>\n", "<function=weather>"),
        written("clock", zone="x"),
        written("clock", more="x", zone=1),
        written("ping", a=1),
        written("other"),
        "Well, " + good,
        f"{good} and",
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    ):
        assert verdict(text, wrong, special) == "wrong", wrong
    assert verdict(text, "", special) == verdict(text, good[:-40], special) == "beginning"


@pytest.mark.parametrize("tool_use", [use(STRICT, EMPTY, parallel=False), use(STRICT, EMPTY, name="weather")])
def test_grammar_allows_exactly_one_call_without_parallel_calls(tool_use: ToolUse) -> None:
    text, good = grammar(tool_use), written("weather", place="Köln")
    assert verdict(text, good) == "whole"
    assert verdict(text, f"{good}\n{good}") == "wrong"
    assert verdict(text, written("ping")) == ("whole" if tool_use.choice.name is None else "wrong")


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_auto_choice_allows_text_or_calls(special: dict[str, int]) -> None:
    text = grammar(use(STRICT, LOOSE, mode="auto"), special)
    good = written("weather", place="Köln")
    for free in ("", "hello", "a <function=weather> <tool b", "grüße\n\n- a", good, f"I look.\n\n{good}\n{good}"):
        assert verdict(text, free, special) == "whole", free
    for wrong in (written("weather", days=1), f"I look.\n{written('weather', place='x', days='y')}", f"{good} and"):
        assert verdict(text, wrong, special) == "wrong", wrong


def test_response_format_allows_json_or_calls() -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "null"}}, "required": ["answer"]}
    content = output_grammar({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, None, (), None)
    found = tool_grammar(use(STRICT, mode="auto"), QWEN3_CODER, {}, content)
    assert found is not None
    assert verdict(found.text, '{"answer": null}') == verdict(found.text, written("weather", place="x")) == "whole"
    assert verdict(found.text, "Well") == "wrong"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}]},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    ],
)
def test_arguments_of_combined_schemas_are_any_text(schema: dict[str, Any]) -> None:
    text = grammar(use(Tool("t", schema, True, {})))
    assert verdict(text, written("t", a="x", c="two\nlines")) == "whole"
    assert len(unenforced(schema)) == 1


def test_reference_of_all_arguments_is_followed() -> None:
    schema = {"$ref": "#/$defs/all", "$defs": {"all": SCHEMA["$defs"]["node"], "node": NODE}}
    text = grammar(use(Tool("t", schema, True, {})))
    assert verdict(text, written("t", x=1, next={"x": 2})) == "whole"
    assert verdict(text, written("t", x=1, next={"y": 2})) == "wrong"
    assert unenforced(schema) == []


def test_keywords_of_strings_that_are_left_out_are_named() -> None:
    properties = {
        "at": {"type": "string", "format": "date", "minLength": 2},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3, "format": "uuid"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "string", "format": "date"}},
    }
    assert unenforced({"type": "object", "properties": properties}) == [
        "#/properties/at/format",
        "#/properties/maybe/format",
        "#/properties/maybe/maxLength",
    ]


FRAGMENTS = ["<parameter=a>", "</parameter>", "</function>", "</tool_call>", "\n", " ", "<", "x", "null", "12", "[1]"]
SCHEMAS: dict[str, Any] = {
    "t": {"type": "object", "properties": {"s": {"type": "string"}, "a": {}}, "required": ["s"],
          "additionalProperties": False},
}  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join))
def test_strings_that_the_grammar_allows_are_read_unchanged(value: str) -> None:
    call = written("t", s=value, a="x")
    if verdict(grammar(use(Tool("t", SCHEMAS["t"], True, {}))), call) != "whole":
        assert "</parameter>" in value or "</tool_call>" in value
        return
    parser = ToolParser(FORMATS["qwen3_coder"], SCHEMAS.keys(), required=True, schemas=SCHEMAS)
    message = join_deltas([*parser.push(call), *parser.finish()])
    assert [json.loads(each.arguments) for each in message.calls] == [{"s": value, "a": "x"}]
