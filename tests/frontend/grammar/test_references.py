"""References that lead to themselves, with and without an end."""

from itertools import pairwise
from typing import Any

import pytest

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar.grammar import schema_grammar
from tandem.frontend.grammar.json_schema import Path
from tandem.frontend.grammar.references import endless_references
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.support.byte_grammar import verdict

NULL: dict[str, Any] = {"type": "null"}
HERE = {"$ref": "#"}
A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


def requires(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


ENDLESS: list[tuple[dict[str, Any], Path]] = [
    (HERE, ()),
    ({**A, "$defs": {"a": A}}, ()),
    ({**A, "$defs": {"a": B, "b": A}}, ()),
    ({"allOf": [HERE, {"type": "string"}]}, ("allOf", 0)),
    ({"allOf": [A], "$defs": {"a": {"allOf": [B]}, "b": {"allOf": [A]}}}, ("allOf", 0)),
    ({"anyOf": [HERE]}, ("anyOf", 0)),
    ({"anyOf": [A, B], "$defs": {"a": requires(B), "b": requires(A)}}, ("anyOf", 1)),
    (requires(HERE), ("properties", "x")),
    (requires({**HERE, "type": "object"}), ("properties", "x")),
    ({**A, "$defs": {"a": requires(A)}}, ()),
    ({**A, "$defs": {"a": requires(B), "b": {"type": "array", "items": A, "minItems": 2}}}, ()),
    ({"type": "array", "items": HERE, "minItems": 1}, ("items",)),
    ({"type": "array", "prefixItems": [NULL, HERE], "minItems": 2}, ("prefixItems", 1)),
    ({"type": "object", "additionalProperties": HERE, "required": ["x"]}, ("additionalProperties",)),
    ({"type": "object", "allOf": [{"properties": {"x": HERE}}, {"required": ["x"]}]}, ("allOf", 0, "properties", "x")),
    # A model may begin with what is not required, too.
    ({"type": "object", "properties": {"x": A}, "$defs": {"a": A}}, ("properties", "x")),
    ({"anyOf": [NULL, A], "$defs": {"a": requires(A)}}, ("anyOf", 1)),
]
ENDING: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"x": HERE}}, '{"x": {"x": {}}}'),
    ({"type": "array", "items": HERE}, "[[], [[]]]"),
    (requires({"anyOf": [HERE, NULL]}), '{"x": {"x": null}}'),
    (requires({"oneOf": [NULL, {"type": "array", "items": HERE}]}), '{"x": [{"x": null}]}'),
    ({**A, "$defs": {"a": requires({"anyOf": [B, NULL]}), "b": requires(A)}}, '{"x": {"x": {"x": null}}}'),
    ({"allOf": [A], "$defs": {"a": requires({"anyOf": [A, NULL]})}}, '{"x": null}'),
    ({"allOf": [A, A], "$defs": {"a": NULL}}, "null"),
    ({**A, "$defs": {"a": {"type": ["array", "null"], "items": A, "minItems": 1}}}, "[[null]]"),
    ({"type": "string", "$defs": {"a": A, "b": requires(B)}}, '"unused"'),
    (requires({"$ref": "#/$defs/a", "$comment": ""}) | {"$defs": {"a": {"enum": [1, 2]}}}, '{"x": 2}'),
]


@pytest.mark.parametrize(("schema", "path"), ENDLESS)
def test_reference_without_an_end_is_refused(schema: dict[str, Any], path: Path) -> None:
    assert path in endless_references(schema)
    with pytest.raises(ApiError) as caught:
        schema_grammar(schema, "p", "'p'")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json_schema")
    assert "$ref" in caught.value.message


@pytest.mark.parametrize("schema", [schema for schema, _ in ENDLESS])
def test_reference_without_an_end_is_removed_unless_strict(schema: dict[str, Any]) -> None:
    ignored = IgnoredFields()
    grammar = schema_grammar(schema, "p", "'p'", strict=False, ignored=ignored)
    assert grammar.schema is not None and endless_references(grammar.schema) == []
    assert ignored.paths and all(path.endswith(".$ref") for path in ignored.paths)


@pytest.mark.parametrize(("schema", "text"), ENDING)
def test_recursion_with_an_end_is_followed(schema: dict[str, Any], text: str) -> None:
    assert endless_references(schema) == []
    assert verdict(schema_grammar(schema, "p", "'p'").text, text) == "whole"


def test_long_chains_are_followed_to_their_end() -> None:
    """Whatever the order in which they are described."""
    names = [f"n{index}" for index in range(400)]
    for order in (names, names[::-1]):
        chain = {name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(order)}
        schema = {"$ref": f"#/$defs/{order[0]}", "$defs": {**chain, order[-1]: NULL}}
        assert endless_references(schema) == []
        assert endless_references({**schema, "$defs": {**chain, order[-1]: {"$ref": f"#/$defs/{order[0]}"}}})
