"""Output constraints under vLLM's names."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.field_types import String, Strings, Typed
from tandem.frontend.request.fields import Field
from tandem.frontend.request.values import decode_field, wrong_type

CHOICES = Strings(max_items=1024, max_chars=1024, min_items=1)
"""Bounds on the number of alternatives of `choice`; an empty list would not constrain the output."""
MAX_PATTERN_CHARS = 64 * 1024

_SCHEMA = "response_format.json_schema.schema"
_TARGETS = {
    "json": _SCHEMA,
    "json_object": "response_format",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Field that each of vLLM's constraints is translated to."""

_OLDER_NAMES = tuple((f"guided_{kind}", kind) for kind in _TARGETS)


class StructuredOutputs(Struct, frozen=True):
    """The content of `structured_outputs`: one constraint."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: None = None


STRUCTURED_FIELDS = (
    Field("structured_outputs", Typed(StructuredOutputs), "A constraint as vLLM writes it."),
    Field("guided_json", Typed(dict[str, Any] | str), "A JSON Schema; vLLM's older name."),
    Field("guided_regex", String(MAX_PATTERN_CHARS), "A regular expression; vLLM's older name."),
    Field("guided_choice", CHOICES, "Alternatives; vLLM's older name."),
    Field("guided_grammar", String(MAX_PATTERN_CHARS), "A grammar in Lark; vLLM's older name."),
)


class Constraints(Struct, frozen=True):
    """Output constraints under this server's names."""

    values: dict[str, Any] = {}
    """Given values of `response_format`, `regex`, `choice` and `grammar`."""
    names: dict[str, str] = {}
    """Maps a field to the request field that it comes from, for error messages."""


def constraints(values: Mapping[str, Any]) -> Constraints:
    """Translate the constraints of a request.

    Raises ApiError 400 for a constraint that is given twice, and for a schema that is not a JSON object.
    """
    own = {name: values.get(name) for name in ("response_format", "regex", "choice", "grammar")}
    found = {name: value for name, value in own.items() if value not in (None, ())}
    names: dict[str, str] = {}
    for path, kind, value in _given(values):
        target = _TARGETS[kind]
        name = target.partition(".")[0]
        if name in found:
            raise unsupported("{other} and {param} cannot be combined; give one of them", path, names.get(name, name))
        found[name] = _translated(kind, value, path)
        names |= {target: path, name: path}
    return Constraints(found, names)


def _given(values: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """List the given constraints, with path and kind."""
    outputs: StructuredOutputs | None = values["structured_outputs"]
    nested = [(f"structured_outputs.{kind}", kind, getattr(outputs, kind)) for kind in _TARGETS] if outputs else []
    older = [(name, kind, values.get(name)) for name, kind in _OLDER_NAMES]
    return [(path, kind, value) for path, kind, value in (*nested, *older) if value not in (None, (), False)]


def _translated(kind: str, value: Any, path: str) -> Any:
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "choice":
        return CHOICES.check(path, list(value))
    if kind != "json":
        return String(MAX_PATTERN_CHARS).check(path, value)
    schema = decode_field(value.encode(), path) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise wrong_type(path, "an object", schema)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
