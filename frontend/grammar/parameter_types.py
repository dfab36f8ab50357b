"""The JSON types of a tool's parameters, for formats of calls that write values as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.frontend.grammar.references import target_of

MAX_NODES = 200
"""Subschemas that are read for the types of one parameter."""

_TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_ALTERNATIVES = ("anyOf", "oneOf")


def parameter_types(schema: Mapping[str, Any] | None, name: str) -> frozenset[str] | None:
    """Return the types that a schema of arguments admits for a parameter; None for any type.

    The schema is the client's and may be malformed: what is not understood admits any type.
    """
    if not isinstance(schema, dict):
        return None
    found = [
        schema_types(node["properties"][name], schema)
        for node in _objects(schema)
        if isinstance(node.get("properties"), dict) and name in node["properties"]
    ]
    if not found:
        others = schema.get("additionalProperties")
        found = [schema_types(others, schema)] if isinstance(others, dict) else [None]
    return _union(found)


def schema_types(node: object, root: dict[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema within `root` admits; None for any type."""
    return _types(node, root, [MAX_NODES])


def _types(node: object, root: dict[str, Any], left: list[int]) -> frozenset[str] | None:
    """Return the types that a schema admits, while nodes are `left` to be read."""
    left[0] -= 1
    if not isinstance(node, dict) or left[0] < 0:
        return None
    found: list[frozenset[str] | None] = []
    if "const" in node:
        found.append(frozenset((_type_of(node["const"]),)))
    if isinstance(node.get("enum"), list):
        found.append(frozenset(map(_type_of, node["enum"])))
    if isinstance(given := node.get("type"), str | list):
        kinds = given if isinstance(given, list) else [given]
        found.append(frozenset(kind for kind in kinds if isinstance(kind, str) and kind in _TYPES) or None)
    if (target := target_of(node, root)) is not None:
        found.append(_types(target[1], root, left))
    for key in _ALTERNATIVES:
        if isinstance(options := node.get(key), list) and options:
            found.append(_union([_types(option, root, left) for option in options]))
    if isinstance(parts := node.get("allOf"), list):
        found += [_types(part, root, left) for part in parts]
    types: frozenset[str] | None = None
    for each in found:
        types = each if types is None else types if each is None else _intersection(types, each)
    return types | {"null"} if types is not None and node.get("nullable") is True else types


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that describe the arguments: a schema, what it refers to, and what it combines."""
    stack: list[object] = [schema]
    for _ in range(MAX_NODES):
        if not stack:
            return
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            if (target := target_of(node, schema)) is not None:
                stack.append(target[1])
            for key in (*_ALTERNATIVES, "allOf"):
                stack += parts if isinstance(parts := node.get(key), list) else ()


def _union(found: list[frozenset[str] | None]) -> frozenset[str] | None:
    types: frozenset[str] = frozenset()
    for each in found:
        if each is None:
            return None
        types |= each
    return types


def _intersection(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    common = one & other
    if "integer" in one | other and "number" in one | other:
        common |= {"integer"}
    return common or one


def _type_of(value: object) -> str:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
