"""JSON schemas that an output can be held to: what is not supported is refused with its place in the schema.

Everything here is quick and bounded; whether a schema can be satisfied is found by compiling it (`grammar_check.py`).
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import unquote

from tandem.frontend.errors import ApiError

MAX_NESTING = 64
"""Levels of JSON, objects and arrays alike; an object in an object's property is two levels deeper."""
MAX_SUBSCHEMAS = 5000
MAX_VALUES = 10_000
EXACT_INTEGER = 2**53
"""Numbers beyond pass through doubles in the compiler and come out as others."""
"""Values of all `enum` together."""

MAX_PLACE = 300

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_FORMATS = {
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
_NUMBERS = {"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_SUPPORTED = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _VALUES | _ANNOTATIONS

_COMPILER_OPTIONS = "x-guidance"
"""Where the compiler looks for its own options: ours to set, not the client's."""
_DROPPED = {_COMPILER_OPTIONS, "$id"}
OPTIONS: dict[str, Any] = {"whitespace_pattern": r" |\n {0,32}"}
"""JSON as it is usually written, on one line or indented. Without a bound a model could write blanks for ever."""
LENIENT_OPTIONS = {**OPTIONS, "lenient": True}
"""Holds to as much of a schema as can be held to."""


class SchemaError(Exception):
    """`place` is a JSON pointer, as a URI fragment."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"at {place if len(place) <= MAX_PLACE else place[:MAX_PLACE] + '...'}: {reason}")


def with_options(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The schema as the compiler takes it."""
    # A name of its own would be where its references to itself lead.
    return {_COMPILER_OPTIONS: options} | {key: value for key, value in schema.items() if key not in _DROPPED}


def check_nesting(value: object) -> None:
    """Raises SchemaError for JSON that is nested too deeply, without recursion."""
    level: list[tuple[str, object]] = [("#", value)]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING + 1:
            raise SchemaError(level[0][0], f"nested more than {MAX_NESTING} levels deep; make it flatter, or use $ref")
        level = [pair for place, parent in level for pair in _containers(place, parent)]


def _containers(place: str, parent: object) -> Iterator[tuple[str, object]]:
    children: Iterator[tuple[object, object]] = iter(())
    if isinstance(parent, dict):
        children = iter(parent.items())
    elif isinstance(parent, list):
        children = iter(enumerate(parent))
    return ((_step(place, key), child) for key, child in children if isinstance(child, dict | list))


def check_schema(schema: dict[str, Any]) -> None:
    """Raises SchemaError for what is too large, malformed, or a keyword that nothing is made of."""
    check_nesting(schema)
    schemas = values = 0
    for place, node in walk(schema):
        schemas += 1
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaError(place, "a schema must be an object or a boolean")
        _check_node(place, node, schema)
        enum = node.get("enum")
        values += len(enum) if isinstance(enum, list) else 0
        if schemas > MAX_SUBSCHEMAS:
            raise SchemaError(place, f"more than {MAX_SUBSCHEMAS} schemas in one; make it smaller")
        if values > MAX_VALUES:
            raise SchemaError(place, f"more than {MAX_VALUES} enum values in one schema; make it smaller")


def walk(schema: object) -> Iterator[tuple[str, object]]:
    """A schema and all within it, each with its place, outer ones first."""
    waiting = [("#", schema)]
    while waiting:
        place, node = waiting.pop()
        yield place, node
        waiting += reversed([(_step(place, *path), child) for path, child in children(node)])


def children(node: object) -> list[tuple[tuple[object, ...], object]]:
    """The schemas right within one, each with the keys that lead there."""
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
    """A copy in which every object among the schemas, outer ones first, is what `change` makes of a copy of it."""
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


def moved(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """A copy for another place: `base` is where it will stand, so that its references to itself still hold."""

    def move(node: dict[str, Any]) -> dict[str, Any]:
        node.pop("$id", None)
        reference = node.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            node["$ref"] = base + reference[1:]
        return node

    result: dict[str, Any] = map_schemas(schema, move)
    return result


async def locate(schema: dict[str, Any], fails_alike: Callable[[dict[str, Any]], Awaitable[bool]]) -> str:
    """The innermost schema that fails in the same way as the whole, by asking for each within the last one found."""
    place, node = "#", schema
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    while True:
        for path, child in children(node):
            if isinstance(child, dict) and await fails_alike({**child, **shared}):
                place, node = _step(place, *path), child
                break
        else:
            return place


def _step(place: str, *keys: object) -> str:
    return "/".join([place, *(str(key).replace("~", "~0").replace("/", "~1")[:100] for key in keys)])


def _check_node(place: str, node: dict[str, Any], root: dict[str, Any]) -> None:
    for key, value in node.items():
        if key not in _SUPPORTED and (not key.startswith("x-") or key == _COMPILER_OPTIONS):
            raise SchemaError(place, f"the keyword {key[:100]!r} is not supported; leave it out")
        if key in _SCHEMA_LISTS and not isinstance(value, list):
            raise SchemaError(place, f"{key!r} must be an array of schemas")
        if key in _SCHEMA_MAPS and not isinstance(value, dict):
            raise SchemaError(place, f"{key!r} must be an object of schemas")
    if "$id" in node and node is not root:
        raise SchemaError(place, "'$id' is supported at the root alone; leave it out")
    _check_type(place, node.get("type", []))
    text_format = node.get("format")
    if isinstance(text_format, str) and text_format not in _FORMATS and _may_be_text(node):
        known = ", ".join(sorted(_FORMATS - {"unknown"}))
        raise SchemaError(place, f"the format {text_format[:100]!r} is not supported; those that are: {known}")
    _check_reference(place, node.get("$ref"), root)
    for key in _NUMBERS & node.keys():
        _check_numbers(_step(place, key), node[key])


def _check_numbers(place: str, value: object) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int) and abs(item) > EXACT_INTEGER:
            raise SchemaError(place, f"the number {str(item)[:40]} is beyond 2**53 and cannot be held to exactly")


def _may_be_text(node: dict[str, Any]) -> bool:
    kind = node.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _check_type(place: str, kinds: object) -> None:
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise SchemaError(place, f"{str(kind)[:100]!r} is no type; there are {', '.join(sorted(_TYPES))}")


def _check_reference(place: str, reference: object, root: dict[str, Any]) -> None:
    if reference is None:
        return
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(
            place, f"$ref must point into the same schema ('#/$defs/...'), not to {str(reference)[:100]!r}"
        )
    node: object = root
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise SchemaError(place, f"$ref {reference[:100]!r} points to nothing")


def refused(error: SchemaError, param: str, name: str) -> ApiError:
    """The 400 of a schema; `name` is what the request calls it."""
    return ApiError(400, f"{name} is invalid {error}", param, "invalid_json_schema")


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
