"""Types that schemas of arguments admit for a parameter, however the schemas are combined."""

from typing import Any

import pytest

from tandem.frontend.grammar.parameter_types import parameter_types

DEFS = {"$defs": {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}, "list": {"items": {"type": "null"}}}}


def of(*types: str) -> frozenset[str]:
    return frozenset(types)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"type": "string"}, of("string")),
        ({"type": ["string", "null"]}, of("string", "null")),
        ({"type": "string", "nullable": True}, of("string", "null")),
        ({"enum": ["a", "b"]}, of("string")),
        ({"enum": ["a", 1, None, True]}, of("string", "integer", "null", "boolean")),
        ({"enum": [1.5, [], {}]}, of("number", "array", "object")),
        ({"type": "integer", "enum": [1, 2]}, of("integer")),
        ({"const": False}, of("boolean")),
        ({"$ref": "#/$defs/text"}, of("string")),
        ({"$ref": "#/$defs/text", "type": "string"}, of("string")),
        ({"$ref": "#/$defs/list"}, None),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/missing"}, None),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, of("string", "null")),
        ({"oneOf": [{"type": "array"}, {"enum": [1]}]}, of("array", "integer")),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, of("string")),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, of("integer")),
        ({"allOf": [{"description": "x"}, {"type": "object"}]}, of("object")),
        ({}, None),
        (True, None),
        ({"type": "str"}, None),
        ({"type": 7}, None),
        ({"type": [7, None]}, None),
        ({"enum": 7, "anyOf": 7, "allOf": {}, "$ref": 7}, None),
        ("no schema", None),
    ],
)  # fmt: skip
def test_types_of_a_property(node: object, expected: object) -> None:
    assert parameter_types({"type": "object", "properties": {"p": node}, **DEFS}, "p") == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (None, None),
        ({}, None),
        ({"type": "object"}, None),
        ({"properties": {"other": {"type": "string"}}}, None),
        ({"properties": 7, "additionalProperties": 7}, None),
        ({"additionalProperties": {"type": "string"}}, of("string")),
        ({"properties": {"p": {"type": "null"}}, "additionalProperties": {"type": "string"}}, of("null")),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"p": {"type": "string"}}}}}, of("string")),
        (
            {"anyOf": [{"properties": {"p": {"type": "string"}}}, {"properties": {"p": {"type": "integer"}}}]},
            of("string", "integer"),
        ),
        ({"allOf": [{"properties": {"q": {}}}, {"properties": {"p": {"type": "array"}}}]}, of("array")),
    ],
)
def test_properties_are_found_in_combined_schemas(schema: Any, expected: object) -> None:
    assert parameter_types(schema, "p") == expected


def test_a_schema_with_many_alternatives_is_read_in_bounded_time() -> None:
    node: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        node = {"anyOf": [node, node]}
    assert parameter_types({"properties": {"p": node}}, "p") is None
