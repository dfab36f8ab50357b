"""Rewrite JSON schemas of common libraries for the grammar compiler.

`rewrite_schema` replaces unsupported keywords with equivalent supported ones. `relax_schema` removes keywords that
cannot be enforced, and returns their JSON pointers.
"""

import re
from typing import Any

from tandem.frontend.grammar.json_schema import (
    COUNTS,
    MAX_EXACT_INTEGER,
    NUMBERS,
    Path,
    check_nesting,
    find_problems,
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
"""Maps keywords to dependent ones, which have another meaning or none without them."""
_DESCRIBES_PROPERTIES = {
    "$ref", "allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "oneOf", "patternProperties", "then",
}  # fmt: skip
"""Keywords that may allow properties not listed in `properties`."""
_MAX_CONDITIONS = 10
"""Maximum number of look-aheads that are rewritten in a pattern."""
_ENDLESS_GROWTH = 8
"""Growth factor of the number of endless references removed per search, to keep the number of searches small."""
_SHORT_FRACTION = r"^[^.]*(\.[0-9]{1,9}([^.0-9][^.]*)?)?$"
"""Limits fractions of a second to nanoseconds; otherwise a model may write digits forever."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_CHARACTER = r"(\\\.|\\-|[A-Za-z0-9_@ -])"
_NOT_FIRST = re.compile(rf"\(\?!{_CHARACTER}\)")
_NEVER_TWICE = re.compile(rf"\(\?!\.\*{_CHARACTER}\1\)")


def rewrite_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema with supported keywords, as far as possible.

    Raises SchemaError if the schema is nested too deeply.
    """
    check_nesting(schema)
    result: dict[str, Any] = map_schemas(schema, _rewrite)
    return result


def relax_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Remove the keywords that cannot be enforced, and return their JSON pointers.

    These are malformed and unsupported keywords, formats and patterns that do not compile, numbers that the compiler
    cannot represent, and endless references. Errors that only the compiler can find are left to `schema_search`.
    """
    pointers: list[str] = []
    while found := [(path, key) for path, node in walk_paths(schema) for key in _unenforceable(node, schema)]:
        # Outer keywords first: their contents are removed with them.
        for path, key in found:
            schema, removed = without_keyword(schema, path, key)
            pointers += removed
    num_removed = 1
    while endless := endless_references(schema):
        for path in endless[:num_removed]:
            schema, removed = without_keyword(schema, path, "$ref")
            pointers += removed
        num_removed *= _ENDLESS_GROWTH
    # `anyOf` may be removed, and once more after `oneOf` has become one.
    return schema, list(dict.fromkeys(pointers))


def without_keyword(schema: dict[str, Any], path: Path, key: str) -> tuple[dict[str, Any], list[str]]:
    """Remove a keyword of the schema at a path and return the JSON pointers of all removed keywords.

    The result allows every value that the schema allowed, so dependent keywords are removed as well. `oneOf` becomes
    `anyOf`. Does nothing if the keyword no longer exists.
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
        # The removed keyword may have allowed properties that are not listed.
        rest.setdefault("additionalProperties", True)
    return _replaced(schema, path, rest), [join_pointer("#", *path, name) for name in removed]


def _replaced(value: Any, path: Path, part: object) -> Any:
    """Copy a value, replacing the part at a path."""
    if not path:
        return part
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], part)
    return copy


def _unenforceable(node: object, root: dict[str, Any]) -> list[str]:
    if not isinstance(node, dict):
        return []
    found = {problem.key for problem in find_problems(node, root)}
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
    """Rewrite tuples of drafts before 2020-12: a list of `items`, and `additionalItems` for the rest."""
    others = node.pop("additionalItems", True)
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        node["items"] = others
    return node


def _with_exact_classes(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the character classes of patterns that are not exact in a JSON string."""
    if isinstance(node.get("pattern"), str):
        node["pattern"] = exact_classes(node["pattern"])
    named = node.get("patternProperties")
    if isinstance(named, dict) and all(isinstance(pattern, str) for pattern in named):
        node["patternProperties"] = {exact_classes(pattern): child for pattern, child in named.items()}
    return node


def _without_nullable(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `nullable` of OpenAPI 3.0, which also allows null if True."""
    nullable = node.get("nullable")
    if not isinstance(nullable, bool):
        return node
    del node["nullable"]
    if not nullable:
        return node
    shared: dict[str, Any] = {key: node.pop(key) for key in ("$defs", "definitions") if key in node}
    return {"anyOf": [node, {"type": "null"}], **shared}


def _has_one_item(node: dict[str, Any]) -> bool:
    max_items = node.get("maxItems")
    return isinstance(max_items, int) and max_items <= 1


def _without_property_names(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `propertyNames` of an object without `properties`, as libraries describe a dict."""
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
    """Rewrite negative look-ahead at the start of a pattern.

    Supported look-aheads forbid a character at the start, or twice in a row, as in zod's e-mail addresses,
    `^(?!\\.)(?!.*\\.\\.)...$`. Each look-ahead becomes a separate pattern in `allOf`.
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
