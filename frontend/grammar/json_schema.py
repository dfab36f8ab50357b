"""Validate and prepare JSON schemas for the grammar compiler.

Unsupported parts are reported with their JSON pointer. All checks are bounded in time. `GrammarChecker` determines
whether a schema can be satisfied, by compiling it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from tandem.frontend.errors import ApiError

MAX_NESTING = 64
"""Levels of JSON nesting, counting objects and arrays; a schema in `properties` is two levels deeper."""
MAX_SUBSCHEMAS = 5000
MAX_ENUM_VALUES = 10_000
"""Maximum total number of values in all `enum` keywords of a schema."""
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
ANNOTATIONS = {
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "contentEncoding", "contentMediaType", "$schema", "$comment", "$id", "id", "$anchor",
}  # fmt: skip
_REMEDIES = {
    "uniqueItems": "remove it (pydantic writes it for a set: take a list), or send the schema without 'strict'",
}
"""Workarounds for unsupported keywords that libraries write."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_COUNT = 2**31 - 1
SUPPORTED_KEYWORDS = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _VALUES | ANNOTATIONS

_COMPILER_OPTIONS = "x-guidance"
"""Keyword of the compiler's options; clients may not set it."""
_DROPPED = {_COMPILER_OPTIONS, "$id", "$schema"}
OPTIONS: dict[str, Any] = {"whitespace_pattern": r" |\n {0,32}"}
"""Allow JSON on one line or indented. The bound keeps a model from emitting blanks forever."""


Path = tuple[object, ...]
"""Keys and indices from a schema to one of its parts."""


class SchemaError(Exception):
    """An error in a schema.

    `pointer` is the JSON pointer of the subschema, as a URI fragment.
    """

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"at {shortened(pointer)}: {reason}")


def shortened(pointer: str) -> str:
    """Shorten a JSON pointer for error messages."""
    return pointer if len(pointer) <= MAX_POINTER_CHARS else pointer[:MAX_POINTER_CHARS] + "..."


def with_options(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Add the compiler's options to a schema."""
    # With `$id`, the compiler would resolve references relative to it. With an old `$schema`, it would not know the
    # newer keywords that `rewrite_schema` writes.
    return {_COMPILER_OPTIONS: options} | {key: value for key, value in schema.items() if key not in _DROPPED}


def check_nesting(value: object) -> None:
    """Raise SchemaError if JSON is nested more than MAX_NESTING levels deep (without recursion)."""
    level: list[_Location] = [(None, "", value)]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING + 1:
            reason = f"nested more than {MAX_NESTING} levels deep; make it flatter, or use $ref"
            raise SchemaError(_pointer_of(level[0]), reason)
        level = [
            (location, key, child) for location in level for key, child in _items(location[2]) if _is_container(child)
        ]


_Location = tuple[Any, object, object]
"""A value of a JSON document: location of its container or None, its key there, and the value.

Pointers are only built for errors, since a document may have a million values.
"""


def _pointer_of(location: _Location) -> str:
    keys: list[object] = []
    while location[0] is not None:
        keys.append(location[1])
        location = location[0]
    return join_pointer("#", *reversed(keys))


def _items(parent: object) -> Iterable[tuple[object, object]]:
    return parent.items() if isinstance(parent, dict) else enumerate(parent) if isinstance(parent, list) else ()


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list)


def check_count(schema: dict[str, Any]) -> None:
    """Raise SchemaError if a schema contains more than MAX_SUBSCHEMAS schemas."""
    for count, (pointer, _) in enumerate(walk_schemas(schema), 1):
        if count > MAX_SUBSCHEMAS:
            raise SchemaError(pointer, f"more than {MAX_SUBSCHEMAS} schemas in one; make it smaller")


def check_schema(schema: dict[str, Any]) -> None:
    """Raise SchemaError if a schema is too large, malformed, or uses an unsupported keyword."""
    check_nesting(schema)
    check_count(schema)
    num_values = 0
    for pointer, node in walk_schemas(schema):
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaError(pointer, "a schema must be an object or a boolean")
        for problem in find_problems(node, schema):
            raise SchemaError(join_pointer(pointer, problem.key) if problem.is_value else pointer, problem.reason)
        enum = node.get("enum")
        num_values += len(enum) if isinstance(enum, list) else 0
        if num_values > MAX_ENUM_VALUES:
            raise SchemaError(pointer, f"more than {MAX_ENUM_VALUES} enum values in one schema; make it smaller")


def walk_schemas(schema: object) -> Iterator[tuple[str, object]]:
    """Yield a schema and all its subschemas with their JSON pointers, in document order."""
    for path, node in walk_paths(schema):
        yield join_pointer("#", *path), node


def walk_paths(schema: object) -> Iterator[tuple[Path, object]]:
    """Yield a schema and its subschemas like `walk_schemas`, each with its path."""
    stack: list[tuple[Path, object]] = [((), schema)]
    while stack:
        path, node = stack.pop()
        yield path, node
        stack += reversed([((*path, *step), child) for step, child in subschemas(node)])


def subschemas(node: object) -> list[tuple[tuple[object, ...], object]]:
    """List the direct subschemas of a schema with their keys."""
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

    `change` gets a copy, in pre-order.
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

    Its internal references are rewritten to resolve there.
    """

    def move(node: dict[str, Any]) -> dict[str, Any]:
        node.pop("$id", None)
        reference = node.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            node["$ref"] = base + reference[1:]
        return node

    result: dict[str, Any] = map_schemas(schema, move)
    return result


def join_pointer(pointer: str, *keys: object) -> str:
    """Append keys to a JSON pointer, escaped as in RFC 6901.

    Keys are truncated to 100 characters.
    """
    return "/".join([pointer, *(str(key).replace("~", "~0").replace("/", "~1")[:100] for key in keys)])


class SchemaProblem(Struct, frozen=True):
    """Malformed or unsupported keyword of a schema."""

    key: str
    reason: str
    is_value: bool = False
    """True if the error is in the keyword's value: its path then ends in the keyword, otherwise in the schema."""


def find_problems(node: dict[str, Any], root: dict[str, Any]) -> Iterator[SchemaProblem]:
    """Yield the malformed and unsupported keywords of one schema within `root`.

    Excludes its subschemas, and errors that only the compiler can find.
    """
    for key, value in node.items():
        if key not in SUPPORTED_KEYWORDS and (not key.startswith("x-") or key == _COMPILER_OPTIONS):
            yield SchemaProblem(key, f"the keyword {key[:100]!r} is not supported; {_REMEDIES.get(key, 'remove it')}")
        elif key in _SCHEMA_LISTS and not isinstance(value, list):
            yield SchemaProblem(key, f"{key!r} must be an array of schemas")
        elif key in _SCHEMA_MAPS and not isinstance(value, dict):
            yield SchemaProblem(key, f"{key!r} must be an object of schemas")
    if "$id" in node and node is not root:
        yield SchemaProblem("$id", "'$id' is supported only at the root; remove it")
    yield from _type_problems(node)
    if "$ref" in node and (reason := _reference_problem(node["$ref"], root)) is not None:
        yield SchemaProblem("$ref", reason)
    for key in ("const", "enum", *NUMBERS):
        if key in node and (number := _inexact(node[key])) is not None:
            reason = f"the number {str(number)[:40]} is beyond 2**53 and cannot be enforced exactly"
            yield SchemaProblem(key, reason, is_value=True)


def _type_problems(node: dict[str, Any]) -> Iterator[SchemaProblem]:
    """Yield the keywords with a value of the wrong type or outside the allowed values."""
    kinds = node.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            yield SchemaProblem("type", f"{str(kind)[:100]!r} is not a type; use one of {', '.join(sorted(_TYPES))}")
            break
    text_format = node.get("format")
    if isinstance(text_format, str) and text_format not in FORMATS and may_be_text(node):
        known = ", ".join(sorted(FORMATS - {"unknown"}))
        yield SchemaProblem("format", f"the format {text_format[:100]!r} is not supported; use one of {known}")
    for key in ("format", "pattern"):
        if not isinstance(node.get(key, ""), str):
            yield SchemaProblem(key, f"{key!r} must be a string", is_value=True)
    for key in COUNTS:
        count = node.get(key, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_COUNT:
            yield SchemaProblem(key, f"{str(count)[:40]!r} is not an integer from 0 to {MAX_COUNT}", is_value=True)
    for key in NUMBERS:
        number = node.get(key, 1)
        is_flag = isinstance(number, bool)  # In draft 4 the exclusive limits are flags.
        if not isinstance(number, int | float) or (is_flag and not key.startswith("exclusive")):
            yield SchemaProblem(key, f"{str(number)[:40]!r} is not a number", is_value=True)
    if not isinstance(node.get("enum", []), list):
        yield SchemaProblem("enum", "'enum' must be an array", is_value=True)
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield SchemaProblem("required", "'required' must be an array of names", is_value=True)


def _inexact(value: object) -> int | None:
    """Return an integer in a value that exceeds MAX_EXACT_INTEGER, or None."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            stack += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int) and abs(item) > MAX_EXACT_INTEGER:
            return item
    return None


def may_be_text(node: dict[str, Any]) -> bool:
    """Return True if the type of a schema allows a string."""
    kind = node.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _reference_problem(reference: object, root: dict[str, Any]) -> str | None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return f"$ref must point into the same schema ('#/$defs/...'), not to {str(reference)[:100]!r}"
    try:
        _, target = resolve(reference, root)
    except KeyError:
        return f"$ref {reference[:100]!r} does not resolve to a schema"
    return None if isinstance(target, dict | bool) else f"$ref {reference[:100]!r} does not resolve to a schema"


def resolve(reference: str, root: object) -> tuple[Path, object]:
    """Resolve a reference to its path and target. Raises KeyError if the target does not exist.

    reference: JSON pointer within the root, as a URI fragment.
    """
    node = root
    path: Path = ()
    if reference != "#" and not reference.startswith("#/"):
        raise KeyError(reference)
    for step in reference.split("/")[1:]:
        key: Any = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
            key = int(key)
        elif not isinstance(node, dict) or key not in node:
            raise KeyError(reference)
        node, path = node[key], (*path, key)
    return path, node


def invalid_schema(error: SchemaError, param: str, name: str) -> ApiError:
    """Return the ApiError 400 for a schema; `name` is the field's name in the message."""
    return ApiError(400, f"{name} is invalid {error}", param, "invalid_json_schema")


_OPEN_KEYWORDS = ("additionalProperties", "patternProperties", "minProperties")
_COMBINING_KEYWORDS = {"allOf", "anyOf", "oneOf", "$ref"}


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Add `additionalProperties: false` to objects that list properties and do not mention others.

    A schema that combines several schemas is returned unchanged: closed, they would exclude each other's properties.
    """
    if any(_combines_schemas(node) for _, node in walk_schemas(schema)):
        return schema
    result: dict[str, Any] = map_schemas(schema, _close_object)
    return result


def _combines_schemas(node: object) -> bool:
    """Return True if an object has to satisfy several schemas at once."""
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
