"""Closing the objects of a schema to properties that it does not list."""

from typing import Any

import pytest

from tandem.frontend.grammar.json_schema import close_objects

NAMED = {"properties": {"a": {}}}
CLOSED = {"properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        ({**NAMED, "required": ["a"]}, {**CLOSED, "required": ["a"]}),
        ({"items": NAMED}, {"items": CLOSED}),
        ({"properties": {"b": NAMED}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [NAMED, {"$ref": "#/$defs/x"}]}, {"anyOf": [CLOSED, {"$ref": "#/$defs/x"}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": NAMED}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
        ({"allOf": [NAMED]}, {"allOf": [CLOSED]}),
        ({"const": NAMED, "default": NAMED}, {"const": NAMED, "default": NAMED}),
    ],
)  # fmt: skip
def test_close_objects_closes_objects_with_listed_properties(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = str(schema)
    assert close_objects(schema) == expected
    assert str(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"properties": {}},
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "patternProperties": {"^b": {}}},
        {**NAMED, "minProperties": 2},
        {**NAMED, "required": ["a", "b"]},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}, "properties": {"a": {}}},
        {"$ref": "#/$defs/x", "anyOf": [NAMED], "$defs": {"x": {"properties": {"b": {}}}}},
    ],
)
def test_close_objects_leaves_combined_and_open_schemas_unchanged(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema
