"""Check and prepare JSON schemas for the grammar compiler.

Parts that are not supported are reported with their JSON pointer. All checks are bounded in time. `GrammarChecker`
finds out whether a schema can be satisfied, by compiling it.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from tandem.frontend.errors import ApiError

MAX_NESTING = 64
"""Levels of JSON nesting, counting objects and arrays; a schema in `properties` is two levels deeper."""
MAX_SUBSCHEMAS = 5000
MAX_ENUM_VALUES = 10_000
"""Values of all `enum` keywords of a schema together."""
MAX_EXACT_INTEGER = 2**53
"""Largest exact integer: the compiler converts numbers to doubles, which changes larger ones."""

MAX_POINTER_CHARS = 300
"""Longest JSON pointer that an error message quotes."""

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
}  # fmt: skip
_SCHEMA = {"items", "additionalProperties"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_VALUES = {
    "type", "format", "enum", "const", "$ref", "required", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
}  # fmt: skip
_ANNOTATIONS = {
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "contentEncoding", "contentMediaType", "$schema", "$comment", "$id", "id", "$anchor",
}  # fmt: skip
_REMEDIES = {
    "uniqueItems": "remove it (pydantic writes it for a set: take a list), or send the schema without 'strict'",
}
"""Ways around keywords that libraries write."""
_NUMBERS = {"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
SUPPORTED_KEYWORDS = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _VALUES | _ANNOTATIONS

_COMPILER_OPTIONS = "x-guidance"
"""Keyword under which the compiler reads its own options; clients may not set it."""
_DROPPED = {_COMPILER_OPTIONS, "$id"}
OPTIONS: dict[str, Any] = {"whitespace_pattern": r" |\n {0,32}"}
"""Allows JSON on one line or indented. The bound keeps a model from emitting blanks without end."""
LENIENT_OPTIONS = {**OPTIONS, "lenient": True}
"""Enforces the supported part of a schema and ignores the rest."""


class SchemaError(Exception):
    """An error in a schema.

    `pointer` is the JSON pointer of the subschema, as a URI fragment.
    """

    def __init__(self, pointer: str, reason: str) -> None:
        shown = pointer if len(pointer) <= MAX_POINTER_CHARS else pointer[:MAX_POINTER_CHARS] + "..."
        super().__init__(f"at {shown}: {reason}")


def with_options(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Add the compiler's options to a schema."""
    # With an `$id`, the compiler would resolve the schema's own references relative to it.
    return {_COMPILER_OPTIONS: options} | {key: value for key, value in schema.items() if key not in _DROPPED}


def check_nesting(value: object) -> None:
    """Raise SchemaError for JSON that is nested more than MAX_NESTING levels deep.

    The check does not recurse.
    """
    level: list[_Place] = [(None, "", value)]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING + 1:
            reason = f"nested more than {MAX_NESTING} levels deep; make it flatter, or use $ref"
            raise SchemaError(_pointer_of(level[0]), reason)
        level = [(place, key, child) for place in level for key, child in _items(place[2]) if _is_container(child)]


_Place = tuple[Any, object, object]
"""A value of a JSON document: the place of its container or None, its key there, and the value. Pointers are only built
for errors, since a document may have a million values."""


def _pointer_of(place: _Place) -> str:
    keys: list[object] = []
    while place[0] is not None:
        keys.append(place[1])
        place = place[0]
    return join_pointer("#", *reversed(keys))


def _items(parent: object) -> Iterable[tuple[object, object]]:
    return parent.items() if isinstance(parent, dict) else enumerate(parent) if isinstance(parent, list) else ()


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list)


def check_count(schema: dict[str, Any]) -> None:
    """Raise SchemaError for a schema with more than MAX_SUBSCHEMAS schemas in it."""
    for count, (pointer, _) in enumerate(walk_schemas(schema), 1):
        if count > MAX_SUBSCHEMAS:
            raise SchemaError(pointer, f"more than {MAX_SUBSCHEMAS} schemas in one; make it smaller")


def check_schema(schema: dict[str, Any]) -> None:
    """Raise SchemaError for a schema that is too large, malformed or unsupported.

    A schema is unsupported if it uses a keyword that is not supported.
    """
    check_nesting(schema)
    check_count(schema)
    num_values = 0
    for pointer, node in walk_schemas(schema):
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaError(pointer, "a schema must be an object or a boolean")
        _check_node(pointer, node, schema)
        enum = node.get("enum")
        num_values += len(enum) if isinstance(enum, list) else 0
        if num_values > MAX_ENUM_VALUES:
            raise SchemaError(pointer, f"more than {MAX_ENUM_VALUES} enum values in one schema; make it smaller")


def walk_schemas(schema: object) -> Iterator[tuple[str, object]]:
    """Yield a schema and its subschemas, each with its JSON pointer.

    All subschemas are included, in document order.
    """
    stack = [("#", schema)]
    while stack:
        pointer, node = stack.pop()
        yield pointer, node
        stack += reversed([(join_pointer(pointer, *path), child) for path, child in subschemas(node)])


def subschemas(node: object) -> list[tuple[tuple[object, ...], object]]:
    """List the direct subschemas of a schema, each with the keys that lead to it."""
    found: list[tuple[tuple[object, ...], object]] = []
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in _SCHEMA:
            found.append(((key,), value))
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            found += [((key, index), child) for index, child in enumerate(value)]
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            found += [((key, name), child) for name, child in value.items()]
    return found


def map_schemas(schema: object, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Copy a schema, applying `change` to each object schema.

    `change` gets a copy of each, outer ones first.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(change(dict(schema)))
    for key, value in copy.items():
        if key in _SCHEMA:
            copy[key] = map_schemas(value, change)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            copy[key] = [map_schemas(child, change) for child in value]
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            copy[key] = {name: map_schemas(child, change) for name, child in value.items()}
    return copy


def rebase_references(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """Copy a schema for embedding at the JSON pointer `base`.

    The copy's references to itself still resolve there.
    """

    def move(node: dict[str, Any]) -> dict[str, Any]:
        node.pop("$id", None)
        reference = node.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            node["$ref"] = base + reference[1:]
        return node

    result: dict[str, Any] = map_schemas(schema, move)
    return result


async def locate_failure(schema: dict[str, Any], fails_alike: Callable[[dict[str, Any]], Awaitable[bool]]) -> str:
    """Find the JSON pointer of the innermost schema that fails like the whole one.

    The search descends from the root: `fails_alike` is called with each subschema of the last one that failed, and
    tells whether it fails in the same way.
    """
    pointer, node = "#", schema
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    while True:
        for path, child in subschemas(node):
            if isinstance(child, dict) and await fails_alike({**child, **shared}):
                pointer, node = join_pointer(pointer, *path), child
                break
        else:
            return pointer


def join_pointer(pointer: str, *keys: object) -> str:
    """Append keys to a JSON pointer, escaped as in RFC 6901.

    Each key is cut at 100 characters.
    """
    return "/".join([pointer, *(str(key).replace("~", "~0").replace("/", "~1")[:100] for key in keys)])


def _check_node(pointer: str, node: dict[str, Any], root: dict[str, Any]) -> None:
    for key, value in node.items():
        if key not in SUPPORTED_KEYWORDS and (not key.startswith("x-") or key == _COMPILER_OPTIONS):
            raise SchemaError(pointer, f"the keyword {key[:100]!r} is not supported; {_REMEDIES.get(key, 'remove it')}")
        if key in _SCHEMA_LISTS and not isinstance(value, list):
            raise SchemaError(pointer, f"{key!r} must be an array of schemas")
        if key in _SCHEMA_MAPS and not isinstance(value, dict):
            raise SchemaError(pointer, f"{key!r} must be an object of schemas")
    if "$id" in node and node is not root:
        raise SchemaError(pointer, "'$id' is supported only at the root; remove it")
    _check_type(pointer, node.get("type", []))
    text_format = node.get("format")
    if isinstance(text_format, str) and text_format not in FORMATS and may_be_text(node):
        known = ", ".join(sorted(FORMATS - {"unknown"}))
        raise SchemaError(pointer, f"the format {text_format[:100]!r} is not supported; use one of {known}")
    _check_reference(pointer, node.get("$ref"), root)
    for key in _NUMBERS & node.keys():
        _check_numbers(join_pointer(pointer, key), node[key])


def _check_numbers(pointer: str, value: object) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            stack += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int) and abs(item) > MAX_EXACT_INTEGER:
            raise SchemaError(pointer, f"the number {str(item)[:40]} is beyond 2**53 and cannot be enforced exactly")


def may_be_text(node: dict[str, Any]) -> bool:
    """Tell whether the type of a schema admits a string."""
    kind = node.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _check_type(pointer: str, kinds: object) -> None:
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise SchemaError(pointer, f"{str(kind)[:100]!r} is not a type; use one of {', '.join(sorted(_TYPES))}")


def _check_reference(pointer: str, reference: object, root: dict[str, Any]) -> None:
    if reference is None:
        return
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(
            pointer, f"$ref must point into the same schema ('#/$defs/...'), not to {str(reference)[:100]!r}"
        )
    node: object = root
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise SchemaError(pointer, f"$ref {reference[:100]!r} does not resolve to a schema")


def invalid_schema(error: SchemaError, param: str, name: str) -> ApiError:
    """Make the 400 for a schema; the message calls the schema's field `name`."""
    return ApiError(400, f"{name} is invalid {error}", param, "invalid_json_schema")


_OPEN_KEYWORDS = ("additionalProperties", "patternProperties", "minProperties")
_COMBINING_KEYWORDS = {"allOf", "anyOf", "oneOf", "$ref"}


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Close objects that list properties and say nothing about others.

    They get `additionalProperties: false`. A schema that combines several schemas is returned unchanged: closed, they
    would exclude each other's properties.
    """
    if any(_combines_schemas(node) for _, node in walk_schemas(schema)):
        return schema
    result: dict[str, Any] = map_schemas(schema, _close_object)
    return result


def _combines_schemas(node: object) -> bool:
    """Tell whether an object has to satisfy several schemas at once."""
    if not isinstance(node, dict):
        return False
    combined = _COMBINING_KEYWORDS & node.keys()
    every = node.get("allOf")
    return (
        len(combined) > 1 or (bool(combined) and "properties" in node) or (isinstance(every, list) and len(every) > 1)
    )


def _close_object(node: dict[str, Any]) -> dict[str, Any]:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or any(keyword in node for keyword in _OPEN_KEYWORDS):
        return node
    if not isinstance(required, list) or not all(isinstance(name, str) and name in named for name in required):
        return node
    return {**node, "additionalProperties": False}
