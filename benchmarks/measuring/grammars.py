"""JSON schemas used by the benchmarks of constrained output."""

from typing import Any

Schema = dict[str, Any]


def record(**properties: Schema) -> Schema:
    """Build the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME: Schema = {"type": "string", "maxLength": 24}
PERSON = record(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 130}, active={"type": "boolean"})

SCHEMAS: dict[str, Schema] = {
    "any JSON": {},
    "any object": {"type": "object"},
    "flat record": PERSON,
    "nested record": record(
        person=PERSON, address=record(street=NAME, zip={"type": "string", "pattern": "^[0-9]{5}$"})
    ),
    "array of records": {"type": "array", "items": PERSON, "maxItems": 50},
    "enum of 100": {"enum": [f"value number {number}" for number in range(100)]},
    "union of 10 records": {"anyOf": [record(**{f"kind_{number}": NAME}) for number in range(10)]},
    "record of 100 properties": record(**{f"property_{number}": NAME for number in range(100)}),
    "date, uuid, e-mail": record(**{kind: {"type": "string", "format": kind} for kind in ("date", "uuid", "email")}),
    "recursive tree": {
        "$defs": {
            "node": record(value={"type": "integer"}, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
        },
        "$ref": "#/$defs/node",
    },
}

ENDLESS: dict[str, Schema] = {
    "strings": {"type": "array", "items": {"type": "string"}, "minItems": 10_000},
    "records": {"type": "array", "items": PERSON, "minItems": 10_000},
    "integers": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000},
    "text": {"type": "string", "minLength": 1_000_000},
}
"""Grammars that no output completes, so that every request generates all its tokens.

`strings` is free text, `{"type": "string"}` without length limits: masks repeat within a string. `text` is one string
with a minimum length that is never reached: every character leads to a new grammar state, so no mask repeats. That is
the cost of `minLength` and `maxLength` alone.
"""
