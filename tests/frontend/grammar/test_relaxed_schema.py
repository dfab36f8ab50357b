"""Schemas as pydantic and zod write them: what is rewritten, what is removed, and what the compiler makes of it."""

import json
from typing import Any

import llguidance
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar import grammar as grammar_module
from tandem.frontend.grammar import relaxed_schema
from tandem.frontend.grammar.grammar import output_grammar, schema_grammar
from tandem.frontend.grammar.json_schema import MAX_SUBSCHEMAS, SUPPORTED_KEYWORDS, check_schema
from tandem.frontend.grammar.references import check_references, endless_references
from tandem.frontend.grammar.relaxed_schema import relax_schema, rewrite_schema, without_keyword
from tandem.frontend.grammar.worker import ByteTokenizer
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.support.byte_grammar import verdict
from tests.support.refusals import raises_api_error

BYTES = ByteTokenizer(300, {})
TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(BYTES), slices=[])
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
INTEGER = {"type": "integer"}


def accepts(schema: dict[str, Any], value: object, strict: bool = True) -> bool:
    """Compile a schema and tell whether it accepts a value."""
    matcher = llguidance.LLMatcher(TOKENIZER, schema_grammar(schema, "p", "'p'", strict).text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return all(matcher.consume_token(token) for token in BYTES(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "string", "nullable": False}, ["a"], [None]),
        ({"enum": ["a"], "nullable": True}, ["a", None], ["b"]),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": INTEGER}}, [1, None], ["b"]),
        ({"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}, "required": ["a"]},
         [{"a": 1}, {"a": None}], [{"a": "x"}, {}]),
        ({"type": "string", "format": "binary"}, ["a"], [1]),
        ({"type": "string", "format": "password", "minLength": 2}, ["ab"], ["a"]),
        ({"type": "string", "pattern": ZOD_EMAIL}, ["a.b@c.de", "a@c.de"], [".a@c.de", "a..b@c.de", "a@c", "a"]),
        ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, ["a.b@c.de"], [".a@c.de", "a..b@c.de"]),
        ({"type": "string", "pattern": "^(?!a)b*$"}, ["b", ""], ["a", "ab"]),
        ({"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INTEGER},
         [{}, {"aa": 1}], [{"b": 1}, {"a": "x"}]),
        ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INTEGER},
         [{}, {"x": 1, "y": 2}], [{"z": 1}, {"x": "1"}]),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER}, [{"a": 1}],
         [{"a": "x"}]),
        ({"type": "string", "format": "date-time"}, ["2024-01-01T00:00:00Z", "2024-01-01T00:00:00.123456789+02:00"],
         ["2024-01-01T00:00:00.1234567890Z", "2024-01-01"]),
        ({"type": "string", "format": "time"}, ["00:00:00Z", "00:00:00.5Z"], ["00:00:00.1234567890Z", "0"]),
        ({"type": "array", "items": INTEGER, "maxItems": 1, "uniqueItems": True}, [[], [1]], [[1, 1]]),
    ],
)  # fmt: skip
def test_rewritten_schema_is_enforced(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    before = json.dumps(schema)
    assert [accepts(schema, value) for value in good] == [True] * len(good)
    assert [accepts(schema, value) for value in bad] == [False] * len(bad)
    assert json.dumps(schema) == before, "the client's schema is not changed"


@pytest.mark.parametrize(
    ("schema", "pointers"),
    [
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, ["#/uniqueItems"]),
        ({"not": {"type": "null"}, "type": "string"}, ["#/not"]),
        ({"type": "object", "properties": {"a": {"type": "array", "contains": INTEGER, "minContains": 1}}},
         ["#/properties/a/contains", "#/properties/a/minContains"]),
        ({"if": {}, "then": {}, "else": {}, "type": "object", "dependentRequired": {"a": ["b"]}},
         ["#/if", "#/then", "#/else", "#/dependentRequired"]),
        ({"anyOf": [{"type": "string", "format": "json-pointer"}, INTEGER]}, ["#/anyOf/0/format"]),
        ({"type": "string", "pattern": "^(?=.*a).*b$"}, ["#/pattern"]),
        ({"type": "string", "pattern": "^(?!abc)x$"}, ["#/pattern"]),
        ({"type": "string", "pattern": "a(?<!b)c"}, ["#/pattern"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["#/maximum"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**53}, ["#/minimum"]),
        ({"enum": [1, 2**60 + 1]}, ["#/enum"]),
        ({"type": "object", "propertyNames": {"minLength": 2}}, ["#/propertyNames"]),
        ({"type": "object", "properties": {"a/b": {"type": "object", "unevaluatedProperties": False}}},
         ["#/properties/a~1b/unevaluatedProperties"]),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_removed_and_named(schema: dict[str, Any], pointers: list[str]) -> None:
    relaxed, removed = relax_schema(rewrite_schema(schema))
    assert removed == pointers
    check_schema(relaxed)
    assert relax_schema(relaxed) == (relaxed, [])
    schema_grammar(schema, "p", "'p'", strict=False)
    if pointers != ["#/pattern"]:  # the compiler refuses those
        with pytest.raises(ApiError) as caught:
            schema_grammar(schema, "p", "'p'", strict=True)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json_schema")


def test_numbers_up_to_2_to_the_64th_can_be_written() -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    assert accepts(schema, 2**64 - 1, strict=False)
    assert not accepts(schema, -1, strict=False)


def test_what_a_search_finds_many_times_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    def counted(schema: dict[str, Any]) -> Any:
        found = endless_references(schema)
        searches.append(len(found))
        return found

    monkeypatch.setattr(relaxed_schema, "endless_references", counted)
    named = {f"p{number}": {"$ref": f"#/properties/p{number}"} for number in range(100)}
    _, pointers = relax_schema({"type": "object", "properties": named})
    assert len(pointers) == 100
    assert searches == [100, 99, 91, 27, 0]
    pattern = "^" + "(?!a)" * 20_000 + "b$"
    assert rewrite_schema({"pattern": pattern}) == {"pattern": pattern}


def test_supported_schema_is_not_relaxed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "date", "x-note": 1}}}
    assert relax_schema(rewrite_schema(schema)) == (schema, [])


@pytest.mark.parametrize("strict", [None, False])
def test_relaxed_keywords_are_recorded_with_their_path(strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": INTEGER, "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    ignored = IgnoredFields()
    assert output_grammar(form, None, (), None, ignored) is not None
    assert ignored.paths == ("response_format.json_schema.schema.properties.tags.uniqueItems",)
    with raises_api_error(400, "unknown_parameter"):
        output_grammar(form, None, (), None, IgnoredFields(refuse=True))


def test_strict_schema_is_refused_with_the_path_of_the_keyword() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with pytest.raises(ApiError, match=r"#/properties/tags:.*'uniqueItems'"):
        output_grammar(form, None, (), None, IgnoredFields())


def test_malformed_keywords_are_left_to_the_check() -> None:
    for schema in (
        {"propertyNames": {"enum": [1]}}, {"propertyNames": {"enum": 5}}, {"propertyNames": {"enum": "ab"}},
        {"propertyNames": 3}, {"nullable": "yes"}, {"pattern": 3}, {"format": []},
        {"maxItems": "x", "uniqueItems": True}, {"maximum": "big"},
    ):  # fmt: skip
        relaxed, _ = relax_schema(rewrite_schema(schema))
        assert isinstance(relaxed, dict)


def test_too_many_schemas_are_refused_before_they_are_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "rewrite_schema", lambda _: pytest.fail("a schema of any size was rewritten"))
    schema = {"anyOf": [{} for _ in range(MAX_SUBSCHEMAS)]}
    with pytest.raises(ApiError, match=f"#/anyOf/{MAX_SUBSCHEMAS - 1}:.*{MAX_SUBSCHEMAS}"):
        schema_grammar(schema, "p", "'p'", strict=False)


def test_names_that_a_schema_does_not_name_may_repeat() -> None:
    """The README states this limit: a grammar does not remember names."""
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": INTEGER}
    text = schema_grammar({**schema, "minProperties": 3}, "p", "'p'").text
    assert verdict(text, '{"a": 1, "b": 1}') == "wrong"
    assert verdict(text, '{"a": 1, "b": 1, "b": 2}') == verdict(text, '{"a": 1, "b": 1, "\\u0061": 2}') == "whole"
    assert verdict(text, '{"a": 1, "b": 1, "a": 2}') == "wrong"


@pytest.mark.parametrize("strict", [True, False])
def test_tuples_of_older_drafts_are_enforced(strict: bool) -> None:
    for draft in ({}, {"$schema": "http://json-schema.org/draft-07/schema#"}):
        pair = {**draft, "type": "array", "items": [INTEGER, {"type": "null"}], "minItems": 2}
        for rest, good, bad in (
            ({}, [[1, None], [1, None, "x"]], [[1], [None, 1]]),
            ({"additionalItems": False}, [[1, None]], [[1, None, 3]]),
            ({"additionalItems": INTEGER, "maxItems": 3}, [[1, None], [1, None, 3]], [[1, None, "x"], [1, None, 3, 4]]),
        ):
            assert [accepts({**pair, **rest}, value, strict) for value in good] == [True] * len(good)
            assert [accepts({**pair, **rest}, value, strict) for value in bad] == [False] * len(bad)
    ignored = IgnoredFields()
    schema_grammar({"items": [INTEGER], "additionalItems": False}, "p", "'p'", False, ignored)
    assert ignored.paths == ()
    assert accepts({"type": "array", "items": INTEGER, "additionalItems": False}, [1, 2], strict)
    assert accepts({**draft, "type": "array", "prefixItems": [INTEGER], "items": False}, [1])


@pytest.mark.parametrize("key", ["minLength", "maxLength"])
def test_whole_numbers_may_be_written_as_decimals(key: str) -> None:
    assert accepts({"type": "string", key: 2.0}, "ab")
    assert not accepts({"type": "string", key: 2.0}, "a" if key == "minLength" else "abc")


@pytest.mark.parametrize(
    ("schema", "key", "value"),
    [
        ({"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False}, "patternProperties",
         {"b": "x"}),
        ({"type": "object", "properties": {"a": INTEGER}, "if": {}, "then": {"properties": {"b": {}}}}, "if",
         {"a": 1, "b": 2}),
        ({"type": "object", "properties": {"a": INTEGER}, "allOf": [{"properties": {"b": {}}}]}, "allOf", {"b": 2}),
        ({"type": "array", "prefixItems": [INTEGER], "items": False}, "prefixItems", ["x", "y"]),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", 1),
        ({"oneOf": [INTEGER, {"type": "number"}], "anyOf": [{"minimum": 0}, {"type": "string"}]}, "oneOf", 1.5),
    ],
)  # fmt: skip
def test_a_removed_keyword_forbids_nothing_more(schema: dict[str, Any], key: str, value: object) -> None:
    relaxed, _ = without_keyword(schema, (), key)
    relaxed, _ = relax_schema(relaxed)
    assert accepts(relaxed, value)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=5), child, max_size=3),
    max_leaves=5,
)
KEYWORDS = st.sampled_from([*SUPPORTED_KEYWORDS, "not", "if", "dependencies", "uniqueItems", "propertyNames"])
SCHEMAS = st.recursive(
    st.dictionaries(KEYWORDS, ANY_JSON, max_size=4),
    lambda child: st.dictionaries(
        KEYWORDS,
        child | st.lists(child, max_size=3) | st.dictionaries(st.sampled_from("abc"), child, max_size=3) | ANY_JSON
        | st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a"]),
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(SCHEMAS)
@example({"anyOf": {}, "oneOf": [None]})
def test_whatever_was_sent_is_relaxed_to_what_the_check_takes(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    relaxed, removed = relax_schema(rewrite_schema(schema))
    check_schema(relaxed)
    check_references(relaxed)
    assert relax_schema(relaxed) == (relaxed, [])
    assert len(set(removed)) == len(removed)
    assert json.dumps(schema) == before
