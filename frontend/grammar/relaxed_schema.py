"""Rewrite JSON schemas, as libraries write them, for the grammar compiler.

`rewrite_schema` changes what can be said in keywords that are supported, and keeps the meaning. `relax_schema` removes
what cannot be enforced, and tells where.
"""

import re
from typing import Any

from tandem.frontend.grammar.json_schema import (
    COUNTS,
    MAX_EXACT_INTEGER,
    NUMBERS,
    Path,
    check_nesting,
    faults,
    join_pointer,
    map_schemas,
    subschemas,
    walk_paths,
)
from tandem.frontend.grammar.patterns import exact_classes
from tandem.frontend.grammar.references import endless_references

_NOTES = {"binary", "byte", "password"}
"""Formats that describe a string without restricting it; pydantic writes them for `bytes` and `SecretStr`."""
_MEANT_TOGETHER = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
}
"""Keywords to those that apply to whatever they leave."""
_DESCRIBES_PROPERTIES = {
    "$ref", "allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "oneOf", "patternProperties", "then",
}  # fmt: skip
"""Keywords that may allow properties which `properties` does not name."""
_MAX_CONDITIONS = 10
"""Look-aheads of one pattern that are rewritten."""
_ENDLESS_GROWTH = 8
"""Factor by which more endless references are removed at once, so that many take few searches."""
_SHORT_FRACTION = r"^[^.]*(\.[0-9]{1,9}([^.0-9][^.]*)?)?$"
"""Bounds the fraction of a second to nanoseconds; without a bound, a model may write digits without end."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_CHARACTER = r"(\\\.|\\-|[A-Za-z0-9_@ -])"
_NOT_FIRST = re.compile(rf"\(\?!{_CHARACTER}\)")
_NEVER_TWICE = re.compile(rf"\(\?!\.\*{_CHARACTER}\1\)")


def rewrite_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of equal meaning in supported keywords, as far as there is one.

    Raises SchemaError for a schema that is nested too deeply to be walked.
    """
    check_nesting(schema)
    result: dict[str, Any] = map_schemas(schema, _rewrite)
    return result


def relax_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Remove the keywords that cannot be enforced, and return their JSON pointers.

    They are keywords that are malformed or not supported, formats and patterns that cannot be compiled, numbers that
    the compiler cannot represent, and references that lead to themselves without an end. What only the compiler knows
    is left to `schema_search`.
    """
    pointers: list[str] = []
    while found := [(path, key) for path, node in walk_paths(schema) for key in _unenforceable(node, schema)]:
        # Outer keywords go first, and what is within them with them.
        for path, key in found:
            schema, removed = without_keyword(schema, path, key)
            pointers += removed
    num_removed = 1
    while endless := endless_references(schema):
        for path in endless[:num_removed]:
            schema, removed = without_keyword(schema, path, "$ref")
            pointers += removed
        num_removed *= _ENDLESS_GROWTH
    return schema, pointers


def without_keyword(schema: dict[str, Any], path: Path, key: str) -> tuple[dict[str, Any], list[str]]:
    """Remove a keyword of the schema at a path, and return the JSON pointers of all that was removed.

    Everything that was allowed stays allowed: what is only meant together with the keyword is removed as well. Of
    `oneOf` its options are kept, as those of `anyOf`. Nothing is removed where it is gone already.
    """
    node: Any = schema
    for step in path:
        if isinstance(node, dict) and step not in node:
            return schema, []
        node = node[step]
    if not isinstance(node, dict) or key not in node:
        return schema, []
    removed = [key, *(other for other in _MEANT_TOGETHER.get(key, ()) if other in node)]
    rest = {name: value for name, value in node.items() if name not in removed}
    if key == "oneOf" and isinstance(node[key], list):
        options = {"anyOf": node[key]}
        rest = {**rest, "allOf": [options]} if "anyOf" in rest and "allOf" not in rest else {**options, **rest}
    elif key in _DESCRIBES_PROPERTIES and "properties" in rest:
        # The properties that it allowed are not those that are named.
        rest.setdefault("additionalProperties", True)
    return _replaced(schema, path, rest), [join_pointer("#", *path, name) for name in removed]


def _replaced(value: Any, path: Path, part: object) -> Any:
    """Copy a value with another part at a path."""
    if not path:
        return part
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], part)
    return copy


def _unenforceable(node: object, root: dict[str, Any]) -> list[str]:
    if not isinstance(node, dict):
        return []
    found = {fault.key for fault in faults(node, root)}
    pattern = node.get("pattern")
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        found.add("pattern")
    found |= {key for key in ("const", "enum", *NUMBERS) if _is_inexact(node.get(key))}
    found |= {str(path[0]) for path, child in subschemas(node) if not isinstance(child, dict | bool)}
    return [key for key in node if key in found]


def _is_inexact(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(number, int | float) and abs(number) > MAX_EXACT_INTEGER for number in values)


def _rewrite(node: dict[str, Any]) -> dict[str, Any]:
    for key in COUNTS:
        if isinstance(count := node.get(key), float) and count.is_integer():
            node[key] = int(count)
    node = _without_nullable(_without_item_lists(node))
    if isinstance(node.get("format"), str) and node["format"] in _NOTES:
        del node["format"]
    if node.get("uniqueItems") is False or _has_one_item(node):
        node.pop("uniqueItems", None)
    node = _without_property_names(node)
    if node.get("format") in ("date-time", "time") and "pattern" not in node:
        node["pattern"] = _SHORT_FRACTION
    return _with_exact_classes(_without_look_ahead(node))


def _without_item_lists(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite tuples as drafts before 2020-12 describe them: a list as `items`, and `additionalItems` for the rest."""
    others = node.pop("additionalItems", True)
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        node["items"] = others
    return node


def _with_exact_classes(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the character classes of patterns that the compiler would not follow exactly in a JSON string."""
    if isinstance(node.get("pattern"), str):
        node["pattern"] = exact_classes(node["pattern"])
    named = node.get("patternProperties")
    if isinstance(named, dict) and all(isinstance(pattern, str) for pattern in named):
        node["patternProperties"] = {exact_classes(pattern): child for pattern, child in named.items()}
    return node


def _without_nullable(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `nullable` of OpenAPI 3.0.

    True allows null beside what the schema describes.
    """
    nullable = node.get("nullable")
    if not isinstance(nullable, bool):
        return node
    del node["nullable"]
    if not nullable:
        return node
    shared: dict[str, Any] = {key: node.pop(key) for key in ("$defs", "definitions") if key in node}
    return {"anyOf": [node, {"type": "null"}], **shared}


def _has_one_item(node: dict[str, Any]) -> bool:
    most = node.get("maxItems")
    return isinstance(most, int) and most <= 1


def _without_property_names(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `propertyNames` of an object that names no properties itself.

    That is how a dict is described.
    """
    names = node.get("propertyNames")
    if not isinstance(names, dict) or not {"properties", "patternProperties"}.isdisjoint(node):
        return node
    if names.keys() - {"type", "title", "description"} == set():
        return {key: value for key, value in node.items() if key != "propertyNames"}
    value = node.get("additionalProperties", True)
    rest = {key: other for key, other in node.items() if key not in ("propertyNames", "additionalProperties")}
    restricting = names.keys() - {"type", "title", "description"}
    allowed = names.get("enum")
    if restricting == {"enum"} and isinstance(allowed, list) and all(isinstance(name, str) for name in allowed):
        return {**rest, "properties": dict.fromkeys(allowed, value), "additionalProperties": False}
    if restricting == {"pattern"} and isinstance(names["pattern"], str):
        return {**rest, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    return node


def _without_look_ahead(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite look-ahead at the start of a pattern.

    It may forbid one character as the first, or twice in a row: zod writes e-mail addresses so,
    `^(?!\\.)(?!.*\\.\\.)...$`. Each look-ahead becomes a pattern of its own, which the text has to match as well.
    """
    pattern = node.get("pattern")
    if not isinstance(pattern, str) or not pattern.startswith("^(?!") or "allOf" in node:
        return node
    rest = pattern[1:]
    conditions: list[str] = []
    while rest.startswith("(?!"):
        if len(conditions) == _MAX_CONDITIONS:
            return node
        if match := _NOT_FIRST.match(rest):
            conditions.append(f"^([^{match[1]}].*)?$")
        elif match := _NEVER_TWICE.match(rest):
            conditions.append(f"^({match[1]}?[^{match[1]}])*{match[1]}?$")
        else:
            return node
        rest = rest[match.end() :]
    others = {key: value for key, value in node.items() if key != "pattern"}
    patterns = [f"^{rest}", *conditions]
    return {**others, "allOf": [{"type": "string", "pattern": each} for each in patterns]}
