"""Numbers that always end, in grammars that otherwise are those of the compiler."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.grammar.grammar import Grammar, schema_body
from tandem.frontend.grammar.json_rules import MAX_DIGITS, MAX_EXPONENT, MAX_FRACTION
from tandem.frontend.grammar.json_schema import rebase_references
from tandem.frontend.grammar.tool_calls import GENERIC_JSON, tool_grammar
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse
from tests.support.byte_grammar import verdict

INTEGER, NUMBER, NULL = {"type": "integer"}, {"type": "number"}, {"type": "null"}
LONG = "1" * MAX_DIGITS
ENDLESS = [LONG + "1", "-" + LONG + "1"]


def grammar_of(schema: dict[str, Any], as_schema: bool = False) -> str:
    return Grammar(schema_body(schema, as_schema), "", "").text


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


PLACES: list[tuple[Any, str]] = [
    (lambda part: part, "{}"),
    (lambda part: record(a=part, b=NULL), '{{"a": {}, "b": null}}'),
    (lambda part: record(a={"anyOf": [NULL, {"type": "array", "items": part}]}), '{{"a": [{}]}}'),
    (lambda part: {"type": "array", "prefixItems": [NULL, part], "items": False}, "[null, {}]"),
    (lambda part: {"type": "object", "additionalProperties": part}, '{{"any": {}}}'),
    (lambda part: {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": record(a={"$ref": "#/$defs/y"}), "y": part}},
     '{{"a": {}}}'),
    (lambda part: record(next={"anyOf": [{"$ref": "#"}, part]}), '{{"next": {{"next": {}}}}}'),
    (lambda _: {}, "[{}]"),
    (lambda _: {"type": "object"}, '{{"a": [1, {}]}}'),
    (lambda _: {"type": ["array", "null"]}, "[{}]"),
]  # fmt: skip
"""Schemas around a number, and their values around it."""


@pytest.mark.parametrize(("around", "value"), PLACES)
def test_numbers_end_wherever_they_are(around: Any, value: str) -> None:
    text = grammar_of(around(NUMBER))
    ending = [LONG, f"-{LONG}", "0", "-0", f"1.{'0' * MAX_FRACTION}", f"1e-{'9' * MAX_EXPONENT}", "1.5E+10"]
    assert [verdict(text, value.format(number)) for number in ending] == ["whole"] * len(ending)
    for number in (*ENDLESS, f"1.{'0' * MAX_FRACTION}1", f"1e{'9' * MAX_EXPONENT}9", "01", "1.", "+1"):
        assert verdict(text, value.format(number)) != "whole", number
    assert verdict(text, value.partition("{}")[0].replace("{{", "{") + LONG + "1") == "wrong"


@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        ({}, ["-7", LONG], ENDLESS),
        ({"minimum": 0}, ["0", "18446744073709551615", LONG], ["-1", *ENDLESS]),
        ({"exclusiveMinimum": 0}, ["1", LONG], ["0", *ENDLESS]),
        ({"minimum": -5}, ["-5", "0", LONG], ["-6", *ENDLESS]),
        ({"maximum": 5}, ["5", "-999999999999999999"], ["6", *ENDLESS]),
        ({"multipleOf": 5}, ["-10", "0", "100"], ["3", *ENDLESS]),
        ({"minimum": 1, "maximum": 20}, ["1", "20"], ["0", "21"]),
        ({"format": "int64"}, ["7", LONG], ENDLESS),
    ],
)
def test_limited_integers_end(limits: dict[str, Any], good: list[str], bad: list[str]) -> None:
    text = grammar_of(record(a={**INTEGER, **limits}))
    assert [verdict(text, f'{{"a":{number}}}') for number in good] == ["whole"] * len(good)
    assert [verdict(text, f'{{"a":{number}}}') for number in bad] == ["wrong"] * len(bad)


@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        ({"minimum": 0}, ["0", "1e5", "0.5", LONG], ["-1"]),
        ({"exclusiveMinimum": 0}, ["0.5", "12.25", "999999999999999999"], ["0", "-1"]),
        ({"minimum": 0, "maximum": 1}, ["0", "1", "0.25", "0.0000000001"], ["1.5", "-0.5"]),
        ({"minimum": -90, "maximum": 90}, ["-90", "52.5200065", "0"], ["90.1", "-91"]),
        ({"maximum": 0.5}, ["0.5", "-123456789.125"], ["0.75"]),
        ({"multipleOf": 0.25}, ["0.75", "-2"], ["0.3"]),
    ],
)
def test_limited_numbers_end(limits: dict[str, Any], good: list[str], bad: list[str]) -> None:
    text = grammar_of({**NUMBER, **limits})
    assert [verdict(text, number) for number in good] == ["whole"] * len(good)
    for number in (*bad, *ENDLESS, "0." + "3" * (MAX_FRACTION + 1), "-0." + "3" * (MAX_FRACTION + 1)):
        assert verdict(text, number) != "whole", number
    assert verdict(text, LONG + "1") == verdict(text, "0." + LONG) == "wrong"


def test_schemas_without_endless_numbers_are_left_to_the_compiler() -> None:
    for schema in (
        record(a={"type": "string"}, b={"enum": [1, 2.5]}, c={"const": 3}),
        record(a={**INTEGER, "minimum": 0, "maximum": 9}),
        {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 2},
    ):
        assert grammar_of(schema) == grammar_of(schema, as_schema=True)


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"oneOf": [NUMBER, TEXT]}, "{}"),
        ({"allOf": [NUMBER, {"minimum": 0}]}, "{}"),
        ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 0}, "{}"),
        ({"type": "object", "patternProperties": {"^a": {"type": ["integer", "null"]}}}, '{{"a": {}}}'),
        ({"type": "object", "additionalProperties": NUMBER, "minProperties": 1}, '{{"a": {}}}'),
        ({"type": "array", "items": NUMBER, "maxItems": 5000}, "[{}]"),
        ({**record(a=NUMBER), "anyOf": [{"required": ["a"]}]}, '{{"a": {}}}'),
        ({"type": ["object", "null"], "properties": {"a": NUMBER, "b": {"$ref": "#/$defs/t"}}, "$defs": {"t": TEXT}},
         '{{"a": {}}}'),
    ],
)  # fmt: skip
def test_numbers_end_in_schemas_that_the_compiler_combines(schema: dict[str, Any], value: str) -> None:
    text = grammar_of(schema)
    assert [verdict(text, value.format(number)) for number in ("0", "12", "123456789")] == ["whole"] * 3
    for number in (*ENDLESS, f"1.{'0' * MAX_FRACTION}1"):
        assert verdict(text, value.format(number)) != "whole", number
    assert verdict(text, value.partition("{}")[0].replace("{{", "{") + LONG + "1") == "wrong"


def test_the_grammar_grows_no_faster_than_the_schema() -> None:
    schema: dict[str, Any] = INTEGER
    for _ in range(30):
        schema = {"type": ["array", "array", "null"], "items": schema}
    assert len(grammar_of(schema)) < 10_000
    names = [f"n{number}" for number in range(50_000)]
    assert len(grammar_of({"type": "object", "properties": {"a": INTEGER}, "required": names})) > len(names)


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_numbers_of_calls_end(mode: Any) -> None:
    parameters = {**record(n={"$ref": "#/$defs/n"}, m=NUMBER), "$defs": {"n": {"anyOf": [INTEGER, NULL]}}}
    tools = (Tool("t", parameters, True, {}), Tool("free", None, False, {}))
    grammar = tool_grammar(ToolUse(tools, ToolChoice(mode)), GENERIC_JSON, {})
    assert grammar is not None
    call = '{{"name": "{}", "arguments": {}}}'
    assert verdict(grammar.text, call.format("t", '{"n": 12, "m": 1e-5}')) == "whole"
    for name, value in (("t", f'{{"n": {LONG}1'), ("t", f'{{"n": null, "m": 0.{LONG}1'), ("free", f'{{"k": [{LONG}1')):
        assert verdict(grammar.text, f'{{"name": "{name}", "arguments": {value}') == "wrong"


NAMES = st.sampled_from(["a", "b", 'c"\\', "é/"])
LEAVES = st.sampled_from([
    {}, INTEGER, NUMBER, NULL, {"type": "string"}, {"type": "boolean"}, {"enum": [1, "a", None]}, {"const": "x"},
    {"type": ["number", "null"]}, {"type": "string", "maxLength": 2}, {"type": "object"}, {"type": "array"}, True,
    {**INTEGER, "minimum": 0}, {"$ref": "#/$defs/d"}, {"type": "string", "pattern": "^[ab]+$"},
])  # fmt: skip
COUNTS = st.none() | st.integers(0, 3)


def _objects(child: Any) -> Any:
    return st.builds(
        lambda named, required, other: {
            "type": "object", "properties": named, "required": [*required], **({} if other is None else other),
        },
        st.dictionaries(NAMES, child, max_size=3), st.sets(NAMES, max_size=2),
        st.none() | st.builds(lambda value: {"additionalProperties": value}, child | st.just(False)),
    )  # fmt: skip


def _arrays(child: Any) -> Any:
    return st.builds(
        lambda first, other, least, most: {
            "type": "array", **({"prefixItems": first} if first else {}), **({"items": other} if other != {} else {}),
            **({} if least is None else {"minItems": least}), **({} if most is None else {"maxItems": most}),
        },
        st.lists(child, max_size=2), child | st.just(False), COUNTS, COUNTS,
    )  # fmt: skip


SCHEMAS = st.recursive(
    LEAVES,
    lambda child: _objects(child) | _arrays(child) | st.builds(lambda options: {"anyOf": options}, st.lists(
        child, min_size=1, max_size=3)),
    max_leaves=8,
).filter(lambda schema: isinstance(schema, dict))  # fmt: skip
VALUES = st.recursive(
    st.sampled_from([None, True, 1, -2, 0.5, "a", "ab", "", "x"]),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(NAMES, child, max_size=4),
    max_leaves=6,
)


@settings(max_examples=40)
@given(SCHEMAS, st.lists(VALUES, min_size=5, max_size=5), st.booleans())
def test_rules_accept_what_the_compiler_accepts(schema: dict[str, Any], values: list[Any], is_indented: bool) -> None:
    whole = {"$defs": {"d": {"anyOf": [NULL, record(d={"$ref": "#/$defs/d"})]}}, **schema}
    wrapped = record(v=rebase_references(whole, "#/properties/v"))
    texts = [json.dumps({"v": value}, ensure_ascii=False, indent=2 if is_indented else None) for value in values]
    try:
        expected = [verdict(grammar_of(wrapped, as_schema=True), text) for text in texts]
    except AssertionError:
        return  # it does not compile
    assert [verdict(grammar_of(wrapped), text) for text in texts] == expected
