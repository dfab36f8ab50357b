"""Rewrite JSON schemas, as libraries write them, for the grammar compiler.

`rewrite_schema` changes what can be said in keywords that are supported, and keeps the meaning. `relax_schema` removes
what cannot be enforced, and tells where.
"""

import re
from typing import Any

from tandem.frontend.grammar.json_schema import (
    FORMATS,
    MAX_EXACT_INTEGER,
    SUPPORTED_KEYWORDS,
    check_nesting,
    join_pointer,
    map_schemas,
    may_be_text,
    walk_schemas,
)

_NOTES = {"binary", "byte", "password"}
"""Formats that describe a string without restricting it; pydantic writes them for `bytes` and `SecretStr`."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
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

    They are keywords that are not supported, formats and patterns that cannot be compiled, and numbers that the
    compiler cannot represent.
    """
    pointers = [
        join_pointer(pointer, key)
        for pointer, node in walk_schemas(schema)
        if isinstance(node, dict)
        for key in _unenforceable(node)
    ]

    def without(node: dict[str, Any]) -> dict[str, Any]:
        removed = _unenforceable(node)
        return {key: value for key, value in node.items() if key not in removed}

    return (map_schemas(schema, without) if pointers else schema), pointers


def _unenforceable(node: dict[str, Any]) -> list[str]:
    found = [key for key in node if key not in SUPPORTED_KEYWORDS and not key.startswith("x-")]
    text_format, pattern = node.get("format"), node.get("pattern")
    if isinstance(text_format, str) and text_format not in FORMATS and may_be_text(node):
        found.append("format")
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        found.append("pattern")
    return found + [key for key in _NUMBERS if _is_inexact(node.get(key))]


def _is_inexact(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(number, int | float) and abs(number) > MAX_EXACT_INTEGER for number in values)


def _rewrite(node: dict[str, Any]) -> dict[str, Any]:
    node = _without_nullable(node)
    if isinstance(node.get("format"), str) and node["format"] in _NOTES:
        del node["format"]
    if node.get("uniqueItems") is False or _has_one_item(node):
        node.pop("uniqueItems", None)
    node = _without_property_names(node)
    if node.get("format") in ("date-time", "time") and "pattern" not in node:
        node["pattern"] = _SHORT_FRACTION
    return _without_look_ahead(node)


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
    rest, conditions = pattern[1:], []
    while rest.startswith("(?!"):
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
