"""Kinds of fields that this server does not serve: refused, or ignored."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from tandem.frontend.errors import ApiError, unsupported_field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.kinds import Checked, Kind, Reader
from tandem.frontend.request.schema import ANY, Schema, constant

_MAX_NEUTRAL_BYTES = 64
"""Bytes of JSON within which a value of an ignored field is compared with those that mean nothing."""


class Unsupported(Checked, frozen=True):
    """A field that would change the output and is refused.

    Null and the values of `accepted`, which change nothing, are taken.
    """

    accepted: tuple[Any, ...] = ()
    hint: str = ""
    """Sentence that the refusal ends with."""

    def check(self, name: str, value: Any) -> None:
        if not any(type(value) is type(known) and value == known for known in self.accepted):
            raise _only(name, self.accepted, self.hint)

    def schema(self) -> Schema:
        # 1 and 1.0 are the same number in JSON.
        return constant(*(value for index, value in enumerate(self.accepted) if value not in self.accepted[:index]))


class Ignored(Kind, frozen=True):
    """A field that does not change the output.

    It is checked to be JSON, never decoded, and recorded as ignored. Values of `accepted` mean the same as no field, so
    they are not recorded. With `never_refused` every value is accepted even where ignored fields are refused.
    """

    accepted: tuple[Any, ...] = ()
    never_refused: bool = False

    def reader(self, name: str) -> Reader:
        return partial(self._record, name)

    def _record(self, name: str, raw: Raw, ignored: IgnoredFields) -> None:
        written = bytes(memoryview(raw)[:_MAX_NEUTRAL_BYTES])
        if any(written == msgspec.json.encode(value) for value in self.accepted):
            return
        if not ignored.refuse:
            ignored.add(name)
        elif not self.never_refused:
            raise _only(name, self.accepted)

    def schema(self) -> Schema:
        return ANY


def _only(name: str, accepted: Iterable[Any], hint: str = "") -> ApiError:
    """Return the 400 for a field that takes only null and the accepted values."""
    values = ", ".join(["null", *(msgspec.json.encode(known).decode() for known in accepted)])
    end = f". {hint}".rstrip(".") if hint else ""
    return unsupported_field(f"{{param}} is not supported; only {values} is accepted{end}", name)
