"""Objects keep to the properties that their schema names.

JSON Schema lets an object have others as well unless it says `additionalProperties`. A model that is free to invent
some does, and may not come to an end. What is generated without them is valid all the same.
"""

from typing import Any

from tandem.frontend.grammar.json_schema import map_schemas, walk

_OPEN_WORDS = ("additionalProperties", "patternProperties", "minProperties")
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` for the objects that name their properties and say nothing of
    others. Left as it is where schemas are combined that would exclude each other's properties."""
    if any(_combines(node) for _, node in walk(schema)):
        return schema
    result: dict[str, Any] = map_schemas(schema, _close)
    return result


def _combines(node: object) -> bool:
    """Whether an object has to satisfy several schemas at once."""
    if not isinstance(node, dict):
        return False
    combined = _COMBINING & node.keys()
    every = node.get("allOf")
    return (
        len(combined) > 1 or (bool(combined) and "properties" in node) or (isinstance(every, list) and len(every) > 1)
    )


def _close(node: dict[str, Any]) -> dict[str, Any]:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or any(word in node for word in _OPEN_WORDS):
        return node
    if not isinstance(required, list) or not all(isinstance(name, str) and name in named for name in required):
        return node
    return {**node, "additionalProperties": False}
