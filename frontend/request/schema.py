"""JSON Schemas of request fields and `/openapi.json`."""

from collections.abc import Mapping
from typing import Any

import msgspec

Schema = dict[str, Any]

ANY: Schema = {}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": ["boolean", "null"]}
ID: Schema = {"type": "integer", "minimum": 0}

_DROPPED = ("title", "discriminator", "default", "description")


def array(items: Schema, max_items: int, min_items: int = 0) -> Schema:
    """Describe an array of `min_items` to `max_items` items."""
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


def constant(*values: Any) -> Schema:
    """Describe one of these values, or null."""
    return {"enum": [*values, None]}


def closed(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Describe an object with these fields and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def opened(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Describe an object with these fields, and possibly others."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": [*required]}


def nullable(*schemas: Schema) -> Schema:
    """Describe a value of any of these schemas, or null."""
    return {"anyOf": [*schemas, {"type": "null"}]}


def of_type(shape: Any) -> Schema:
    """Derive the schema of a msgspec type, with every reference inlined."""
    (schema,), components = msgspec.json.schema_components([shape], ref_template="{name}")
    return _inlined(schema, components)


def _inlined(schema: Schema, components: Mapping[str, Schema]) -> Schema:
    if "$ref" in schema:
        return _inlined(components[schema["$ref"]], components)
    found = {name: value for name, value in schema.items() if name not in _DROPPED}
    if "properties" in found:
        found["properties"] = {name: _inlined(part, components) for name, part in found["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(found.get(name), dict):
            found[name] = _inlined(found[name], components)
    if "anyOf" in found:
        parts = [_inlined(part, components) for part in found["anyOf"]]
        found["anyOf"] = [member for part in parts for member in (part["anyOf"] if [*part] == ["anyOf"] else [part])]
    return found
