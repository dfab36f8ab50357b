"""Tables of request fields.

They parse a body, describe it for `/openapi.json` and name its flags.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.errors import malformed
from tandem.frontend.request.kinds import Ignored, Kind, Unsupported
from tandem.frontend.request.schema import Schema, closed
from tandem.frontend.request.values import unknown_field


class Field(Struct, frozen=True):
    """One field of a request body."""

    name: str
    kind: Kind
    text: str = ""
    """One sentence for `/openapi.json`."""
    required: bool = False
    extra: Mapping[str, Any] = {}
    """Further keywords of the field's schema."""

    def schema(self) -> Schema:
        """Describe the field as a JSON Schema."""
        found = {**self.kind.schema(), **self.extra}
        if self.required and isinstance(found.get("type"), list):
            found["type"] = found["type"][0]
        return {**found, "description": self.text} if self.text else found

    @property
    def help(self) -> str:
        """The text as the help of a command-line flag.

        It is not capitalized and does not end in a period.
        """
        return (self.text[:1].lower() + self.text[1:]).rstrip(".")

    @property
    def is_documented(self) -> bool:
        """False for a field that is not supported and can only be null."""
        return not (isinstance(self.kind, Unsupported) and not self.kind.accepted)


IGNORED_FIELDS = tuple(
    Field(name, Ignored())
    for name in (
        *("user", "metadata", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
)
"""Fields that cannot change the output, whatever their values. Every body may have them."""


class BodyFormat:
    """A JSON object with the fields of a table and no others.

    The body is first split into the JSON of its fields. Nothing is decoded of an ignored field, and the first unknown
    name ends the parsing, so that a rejected body costs at most one pass over its bytes.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = tuple(fields)
        table = {field.name: field for field in (*IGNORED_FIELDS, *self.fields)}
        self._readers = {name: field.kind.reader(name) for name, field in table.items()}
        self._required = tuple(field.name for field in self.fields if field.required)
        self._absent = {field.name: field.kind.absent for field in self.fields}
        shape = msgspec.defstruct("Body", [(name, Raw, Raw()) for name in table], forbid_unknown_fields=True)
        self._decoder = msgspec.json.Decoder(shape)
        self._names = msgspec.json.Decoder(dict[_FieldName, Raw], dec_hook=self._check_name)

    def read(self, body: bytes | Raw) -> dict[str, Any]:
        """Parse every field of the table; an absent or null field has its default.

        Raises ApiError 400 for a malformed body or field, 422 for an unknown field or a value that is not supported.
        """
        values = dict(self._absent)
        for name, raw in self._split(body).items():
            if bytes(memoryview(raw)[:4]) != b"null":
                values[name] = self._readers[name](raw)
        for name in self._required:
            if values[name] is None:
                raise malformed("the field {param} is required", name)
        return values

    def schema(self) -> Schema:
        """Describe the whole body as a JSON Schema."""
        shown = [field for field in self.fields if field.is_documented]
        required = {field.name: field.schema() for field in shown if field.required}
        return closed(required, {field.name: field.schema() for field in shown if not field.required})

    def _split(self, body: bytes | Raw) -> dict[str, Raw]:
        try:
            fields = msgspec.structs.asdict(self._decoder.decode(body))
        except RecursionError:
            raise malformed("the body is nested too deeply") from None
        except msgspec.ValidationError as error:
            self._check_names(body)
            raise malformed(f"the body must be a JSON object: {error}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise malformed(f"the body is not valid JSON: {error}") from None
        return {name: raw for name, raw in fields.items() if len(memoryview(raw))}

    def _check_names(self, body: bytes | Raw) -> None:
        """Raise ApiError 422 for the first field of an object that is not in the table."""
        try:
            self._names.decode(body)
        except msgspec.ValidationError:
            return

    def _check_name(self, _: type, name: str) -> "_FieldName":
        if name not in self._readers:
            raise unknown_field(name)
        return _FieldName(name)


class _FieldName(str):
    """The name of a field, which the decoder checks as soon as it has read it."""
