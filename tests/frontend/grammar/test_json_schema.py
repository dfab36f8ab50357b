"""Supported and unsupported JSON schemas, and the place of an error."""

import re
from typing import Any

import pytest

from tandem.frontend.grammar.json_schema import (
    MAX_NESTING,
    SchemaError,
    check_nesting,
    check_schema,
    rebase_references,
    walk_schemas,
    with_options,
)


def error_of(schema: dict[str, Any]) -> str:
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    return str(caught.value)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


UNSUPPORTED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "propertyNames", "dependentRequired", "nullable"),
    *("unevaluatedProperties", "dependencies", "additionalItems", "$dynamicRef", "requried", "x-guidance"),
)


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keyword_is_reported_with_its_pointer(keyword: str) -> None:
    schema = {"properties": {"a/b": {"anyOf": [{}, {"items": {keyword: True}}]}}}
    pointer = "#/properties/a~1b/anyOf/1/items"
    assert re.match(rf"at {pointer}: .*'{re.escape(keyword)}'.*\bnot supported\b", error_of(schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "objekt"}, "at #: 'objekt' .*type"),
        ({"items": {"minimum": 10**20}}, r"at #/items/minimum: .* 100000000000000000000 .*2\*\*53"),
        ({"enum": [1, {"a": [2**53, -(2**53) - 1]}]}, r"at #/enum: .* -9007199254740993 .*2\*\*53"),
        ({"const": 12345678901234567890123}, r"at #/const: .* 12345678901234567890123 .*2\*\*53"),
        ({"items": {"type": ["string", 3]}}, "at #/items: '3' .*type"),
        ({"items": {"format": "iri"}}, "at #/items: .*format 'iri'"),
        ({"items": 3}, "at #/items: .*object or .*boolean"),
        ({"anyOf": {}}, "at #: 'anyOf' .*array"),
        ({"properties": []}, "at #: 'properties' .*object"),
        ({"items": {"$ref": "http://example.org/x"}}, r"at #/items: \$ref .*same schema"),
        ({"items": {"$ref": "other.json#/x"}}, r"at #/items: \$ref .*same schema"),
        ({"$ref": "#/$defs/a"}, r"at #: \$ref '#/\$defs/a' .*not resolve"),
        ({"anyOf": [{"$ref": "#/anyOf/7"}]}, r"at #/anyOf/0: \$ref '#/anyOf/7' .*not resolve"),
        ({"items": {"$id": "x"}}, r"at #/items: '\$id' .*root"),
        ({"enum": list(range(10_001))}, "at #: .* 10000 enum"),
        ({"anyOf": [{}] * 5000}, " 5000 schemas"),
        (nested(MAX_NESTING + 2), f"nested .* {MAX_NESTING} "),
    ],
)
def test_check_schema_rejects_invalid_schemas(schema: dict[str, Any], text: str) -> None:
    assert re.search(text, error_of(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        nested(MAX_NESTING),
        {"type": "integer", "format": "int32"},
        {"type": ["string", "null"], "description": "d", "default": {"not": 1}, "examples": [{"if": 1}]},
        {"properties": {"not": {"const": {"uniqueItems": 1}}, "$ref": {}}},
        {"$defs": {"a~b/c d": {}}, "items": {"$ref": "#/$defs/a~0b~1c%20d"}},
        {"$id": "http://example.org", "$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#"},
        {"additionalProperties": False, "patternProperties": {"^a": True}, "x-order": 3},
    ],
)
def test_check_schema_accepts_valid_schemas(schema: dict[str, Any]) -> None:
    check_schema(schema)


def test_nesting_is_checked_without_recursion() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SchemaError):
        check_nesting(deep)
    with pytest.raises(SchemaError, match=f"#/a~1b{'/0' * MAX_NESTING}:.*{MAX_NESTING}"):
        check_nesting({"x": [{}], "a/b": deep})


def test_walk_schemas_yields_outer_schemas_first() -> None:
    schema = {
        "properties": {"a": {"items": True}},
        "allOf": [{"$defs": {"b": {}}}],
        "enum": [{"items": {}}],
        "default": {"properties": {"no": {}}},
    }
    assert [pointer for pointer, _ in walk_schemas(schema)] == [
        "#", "#/properties/a", "#/properties/a/items", "#/allOf/0", "#/allOf/0/$defs/b",
    ]  # fmt: skip


def test_rebased_references_resolve_at_the_new_pointer() -> None:
    schema = {
        "$id": "gone",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}, "c": {"const": {"$ref": "#/kept"}}},
        "anyOf": [{"items": {"$ref": "#/$defs/x"}}, True],
        "$defs": {"x": {}},
    }
    before = str(schema)
    assert rebase_references(schema, "#/base") == {
        "properties": {"a": {"$ref": "#/base/$defs/x"}, "b": {"$ref": "#/base"}, "c": {"const": {"$ref": "#/kept"}}},
        "anyOf": [{"items": {"$ref": "#/base/$defs/x"}}, True],
        "$defs": {"x": {}},
    }
    assert str(schema) == before


def test_client_cannot_set_compiler_options() -> None:
    assert with_options({"x-guidance": {"lenient": True}, "$id": "x", "$schema": "y", "type": "object"}, {"a": 1}) == {
        "x-guidance": {"a": 1},
        "type": "object",
    }
