"""Schemas of clients that mean to keep a server busy, each unlike any other."""

from typing import Any

from tests.support.stream_client import completion

PRIMES = (7, 11, 13, 17, 19)


def hostile_schema(number: int) -> dict[str, Any]:
    """Build a schema that takes long to compile.

    Of each four, two take the better part of the CPU time that a check may take and reach the engine, one takes a tenth
    of a second, and one more than a check may take.
    """
    kind = number % 4
    if kind == 3:
        factors: tuple[int, ...] = (7919, 7907)
    else:
        factors = PRIMES if kind else PRIMES[:4]
    multiple = {"type": "integer", "allOf": [{"multipleOf": factor} for factor in factors]}
    return _object(f"hostile{number}", multiple)


def ordinary_schema(number: int) -> dict[str, Any]:
    """Build a schema as programs send them: a few properties of simple types."""
    fields = {"age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}
    return _object(f"name{number}", {"type": "string"}, **fields)


def constrained(schema: dict[str, Any], max_tokens: int = 2) -> bytes:
    """Build a completion whose output follows a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return completion(max_tokens, stream=False, response_format=form)


def _object(name: str, value: dict[str, Any], **others: dict[str, Any]) -> dict[str, Any]:
    properties = {name: value, **others}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}
