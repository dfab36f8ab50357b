"""Tables of request fields.

A table parses a body, describes it in `/openapi.json` and provides command-line flags.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.errors import malformed
from tandem.frontend.request.field_types import FieldType, Ignored, Reader, Unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.known_names import split_object
from tandem.frontend.request.schema import Schema, opened


class Field(Struct, frozen=True):
    """Field of a request body."""

    name: str
    type: FieldType
    text: str = ""
    """Sentence for `/openapi.json`."""
    required: bool = False
    extra: Mapping[str, Any] = {}
    """Additional keywords of the field's schema."""

    def schema(self) -> Schema:
        """Describe the field as a JSON Schema."""
        found = {**self.type.schema(), **self.extra}
        if self.required and isinstance(found.get("type"), list):
            found["type"] = found["type"][0]
        return {**found, "description": self.text} if self.text else found

    def reader(self) -> Reader:
        """Return the function that parses the JSON of the field.

        The error for an unsupported field ends with its text, which says what to use instead.
        """
        field_type = self.type
        if isinstance(field_type, Unsupported):
            field_type = msgspec.structs.replace(field_type, hint=self.text)
        return field_type.reader(self.name)

    @property
    def help(self) -> str:
        """The text as help of a command-line flag.

        It is not capitalized and does not end in a period.

        """
        return (self.text[:1].lower() + self.text[1:]).rstrip(".")


IGNORED_FIELDS = tuple(
    Field(name, Ignored(never_refused=True), text)
    for name, text in (
        ("user", "Names the end user; nothing here depends on it."),
        ("metadata", "Pairs for the sender's own use."),
        ("safety_identifier", "Names the end user; nothing here depends on it."),
        ("prompt_cache_key", "Prompts share the cache without a key; `cache_salt` separates them."),
        ("prompt_cache_retention", "The cache keeps what it has room for."),
        ("prompt_cache_options", "The cache keeps what it has room for."),
    )
)
"""Fields that never change the output. Every body may have them."""


class BodyFormat:
    """JSON object with the fields of a table.

    The body is first split into the JSON of its fields; ignored fields are not decoded. Unknown fields are recorded as
    ignored, or refused.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = tuple(fields)
        table = {field.name: field for field in (*IGNORED_FIELDS, *self.fields)}
        self._readers = {name: field.reader() for name, field in table.items()}
        self._required = tuple(field.name for field in self.fields if field.required)
        self._absent = {field.name: field.type.absent for field in self.fields}
        self._missing = Raw()
        slots = [(name, Raw, self._missing) for name in table]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Body", slots, forbid_unknown_fields=True))
        self._tolerant = msgspec.json.Decoder(msgspec.defstruct("TolerantBody", slots))

    @property
    def names(self) -> frozenset[str]:
        """Names of all fields of the table."""
        return frozenset(self._readers)

    def read(self, body: bytes | Raw, ignored: IgnoredFields) -> dict[str, Any]:
        """Parse all fields of the table; absent and null fields have their defaults.

        Raises ApiError 400 for a malformed body or field, for a value that is not supported, and for an unknown field
        if those are refused.

        """
        values = dict(self._absent)
        for name, raw in self._split(body, ignored).items():
            if bytes(memoryview(raw)[:4]) != b"null":
                values[name] = self._readers[name](raw, ignored)
        for name in self._required:
            if values[name] is None:
                raise malformed("the field {param} is required", name)
        return values

    def schema(self) -> Schema:
        """Describe the whole body as a JSON Schema."""
        required = {field.name: field.schema() for field in self.fields if field.required}
        return opened(required, {field.name: field.schema() for field in self.fields if not field.required})

    def _split(self, body: bytes | Raw, ignored: IgnoredFields) -> dict[str, Raw]:
        try:
            fields = self._decode(body, ignored)
        except RecursionError:
            raise malformed("the body is nested too deeply") from None
        except msgspec.ValidationError as error:
            raise malformed(f"the body must be a JSON object: {error}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise malformed(f"the body is not valid JSON: {error}") from None
        missing = self._missing
        return {name: raw for name, raw in msgspec.structs.asdict(fields).items() if raw is not missing}

    def _decode(self, body: bytes | Raw, ignored: IgnoredFields) -> msgspec.Struct:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError:
            fields: msgspec.Struct = self._tolerant.decode(body)
        for name in split_object(body):
            if name not in self._readers:
                ignored.add(name)
        return fields
