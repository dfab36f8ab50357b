"""Types of values that a request field can hold.

Each parses the JSON of a field and describes it as a schema. `Unsupported` and `Ignored` are for fields that are not
served.
"""

import math
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct, StructMeta

from tandem.frontend.errors import ApiError, malformed, unsupported, unsupported_field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import ANY, BOOLEAN, ID, Schema, array, constant, nullable, of_type
from tandem.frontend.request.values import TypedDecoder, decode_field, type_name, wrong_type

Reader = Callable[[Raw, IgnoredFields], Any]
"""Function that parses the JSON of a field and records nested names without effect."""

MAX_FIELD_BYTES = 256 * 1024
"""Maximum bytes of JSON of an ordinary field: more than any valid value needs, and fast to decode."""
MAX_BIAS = 100.0
"""Maximum absolute bias of a token."""
_MAX_ID_DIGITS = 10
_CONTROLS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


class _AbstractStruct(StructMeta, ABCMeta):
    """Metaclass of structs with abstract methods."""


class FieldType(Struct, metaclass=_AbstractStruct, frozen=True):
    """Base class of all field types.

    An absent field and null mean the default. A wrong JSON type, and a value that is out of range or not supported,
    raise ApiError 400 with the field name.
    """

    @property
    def absent(self) -> Any:
        """Value of an absent or null field."""
        return None

    @property
    def flag_type(self) -> type:
        """Type of a command-line flag for this value."""
        return str

    @abstractmethod
    def reader(self, name: str) -> Reader:
        """Return the function that parses the JSON of a field of this name.

        It is not called for null.
        """

    @abstractmethod
    def schema(self) -> Schema:
        """Describe the accepted values as a JSON Schema."""


class CheckedType(FieldType, frozen=True):
    """Base class of the types that check a decoded value of ordinary size."""

    def reader(self, name: str) -> Reader:
        return lambda raw, _ignored: self.check(name, decode_field(sized(name, raw), name))

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """Validate and normalize a decoded value.

        Raises ApiError 400 for a wrong JSON type, and for a value out of range or not supported.

        """


class Integer(CheckedType, frozen=True):
    """Integer within inclusive bounds."""

    minimum: int
    maximum: int
    default: int | None = None

    @property
    def absent(self) -> int | None:
        return self.default

    @property
    def flag_type(self) -> type:
        return int

    def check(self, name: str, value: Any) -> int:
        # JSON has a single number type, and some clients write 16 as 16.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise wrong_type(name, "an integer", value)
        if not self.minimum <= value <= self.maximum:
            raise unsupported(f"{{param}} must be between {self.minimum} and {self.maximum}, not {value}", name)
        return value

    def schema(self) -> Schema:
        default = {} if self.default is None else {"default": self.default}
        return {"type": ["integer", "null"], "minimum": self.minimum, "maximum": self.maximum, **default}


class Number(CheckedType, frozen=True):
    """Finite number within bounds.

    The bounds are inclusive; with `above_minimum`, the minimum itself is excluded.

    """

    minimum: float
    maximum: float
    default: float | None = None
    above_minimum: bool = False

    @property
    def absent(self) -> float | None:
        return self.default

    @property
    def flag_type(self) -> type:
        return float

    def check(self, name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise wrong_type(name, "a number", value)
        low, high = self.minimum, self.maximum
        if not low <= value <= high or (self.above_minimum and value == low) or not math.isfinite(value):
            bounds = f"above {low:g} and at most {high:g}" if self.above_minimum else f"between {low:g} and {high:g}"
            raise unsupported(f"{{param}} must be {bounds}, not {value}", name)
        return float(value)

    def schema(self) -> Schema:
        lowest = "exclusiveMinimum" if self.above_minimum else "minimum"
        default = {} if self.default is None else {"default": _as_written(self.default)}
        bounds = {lowest: _as_written(self.minimum), "maximum": _as_written(self.maximum)}
        return {"type": ["number", "null"], **bounds, **default}


class Boolean(CheckedType, frozen=True):
    """Boolean."""

    default: bool | None = False

    @property
    def absent(self) -> bool | None:
        return self.default

    def check(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise wrong_type(name, "a boolean", value)
        return value

    def schema(self) -> Schema:
        return BOOLEAN


class String(CheckedType, frozen=True):
    """String of any content, or with a limited length.

    The length is 1 to `max_chars` characters, and at most `max_bytes` bytes of UTF-8. With `one_line`, it has no
    control characters, so that it can be part of a URL.
    """

    max_chars: int | None = None
    max_bytes: int | None = None
    default: str | None = None
    one_line: bool = False

    @property
    def absent(self) -> str | None:
        return self.default

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        if self.max_chars is not None and not 1 <= len(value) <= self.max_chars:
            raise unsupported(f"{{param}} must have 1 to {self.max_chars} characters, not {len(value)}", name)
        if self.max_bytes is not None and (size := len(value.encode())) > self.max_bytes:
            raise unsupported(f"{{param}} has {size} bytes in UTF-8; at most {self.max_bytes} are allowed", name)
        if self.one_line and (bad := _CONTROLS.search(value)):
            raise unsupported(f"{{param}} may not have control characters such as {bad[0]!r}", name)
        return value

    def schema(self) -> Schema:
        found: Schema = {"type": ["string", "null"]}
        return found if self.max_chars is None else {**found, "minLength": 1, "maxLength": self.max_chars}


class OneOf(CheckedType, frozen=True):
    """One of several strings."""

    values: tuple[str, ...]

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        if value not in self.values:
            known = ", ".join(repr(known) for known in self.values)
            raise unsupported(f"{{param}} must be one of {known}, not {value[:40]!r}", name)
        return value

    def schema(self) -> Schema:
        return constant(*self.values)


class Strings(CheckedType, frozen=True):
    """String or array of strings; parsed to a tuple.

    It has `min_items` to `max_items` strings, each of 1 to `max_chars` characters. With `drop_empty`, empty strings are
    dropped instead of refused.
    """

    max_items: int
    max_chars: int
    drop_empty: bool = False
    min_items: int = 0

    @property
    def absent(self) -> tuple[str, ...]:
        return ()

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise wrong_type(name, "a string or an array of strings", value)
        _check_items(name, "a string or an array of strings", values, str)
        if len(values) > self.max_items:
            raise unsupported(f"{{param}} takes at most {self.max_items} strings, not {len(values)}", name)
        if len(values) < self.min_items:
            least = f"{self.min_items} string{'s' * (self.min_items > 1)}"
            raise unsupported(f"{{param}} takes at least {least}, not {len(values)}", name)
        values = [item for item in values if item or not self.drop_empty]
        for item in values:
            if not 1 <= len(item) <= self.max_chars:
                raise unsupported(
                    f"a string in {{param}} must have 1 to {self.max_chars} characters, not {len(item)}", name
                )
        return tuple(values)

    def schema(self) -> Schema:
        item = {"type": "string", "minLength": 0 if self.drop_empty else 1, "maxLength": self.max_chars}
        return nullable(item, array(item, self.max_items, self.min_items))


class TokenIds(CheckedType, frozen=True):
    """Array of at most `max_items` token ids; parsed to a tuple."""

    max_items: int

    @property
    def absent(self) -> tuple[int, ...]:
        return ()

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise wrong_type(name, "an array of token ids", value)
        _check_items(name, "an array of token ids", value, int)
        if len(value) > self.max_items:
            raise unsupported(f"{{param}} takes at most {self.max_items} ids, not {len(value)}", name)
        return tuple(value)

    def schema(self) -> Schema:
        return nullable(array(ID, self.max_items))


class TokenBiases(CheckedType, frozen=True):
    """Object that maps token ids to biases.

    It has at most `max_items` ids; biases are between -MAX_BIAS and MAX_BIAS.

    """

    max_items: int

    @property
    def absent(self) -> dict[int, float]:
        return {}

    def check(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        if len(value) > self.max_items:
            raise unsupported(f"{{param}} takes at most {self.max_items} tokens, not {len(value)}", name)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
                raise unsupported(f"the keys of {{param}} must be token ids, not {key[:40]!r}", name)
            if type(bias) not in (int, float):
                raise malformed(f"the values of {{param}} must be numbers, not {type_name(bias)}", name)
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                bounds = f"between {-MAX_BIAS:g} and {MAX_BIAS:g}"
                raise unsupported(f"the values of {{param}} must be {bounds}, not {bias}", name)
            biases[int(key)] = float(bias)
        return biases

    def schema(self) -> Schema:
        bias = {"type": "number", "minimum": _as_written(-MAX_BIAS), "maximum": _as_written(MAX_BIAS)}
        return nullable(
            {
                "type": "object",
                "propertyNames": {"pattern": f"^[0-9]{{1,{_MAX_ID_DIGITS}}}$"},
                "additionalProperties": bias,
                "maxProperties": self.max_items,
            }
        )


class JsonObject(CheckedType, frozen=True):
    """Object with content that is validated later."""

    def check(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        return value

    def schema(self) -> Schema:
        return {"type": ["object", "null"]}


class Typed(FieldType, frozen=True):
    """Value of a msgspec type.

    content: its schema, if values are restricted beyond the type. max_bytes: maximum bytes of its JSON.
    """

    shape: Any
    content: Schema | None = None
    max_bytes: int = MAX_FIELD_BYTES

    def reader(self, name: str) -> Reader:
        decoder = TypedDecoder(self.shape)
        return lambda raw, ignored: decoder.read(sized(name, raw, self.max_bytes), name, ignored)

    def schema(self) -> Schema:
        return of_type(self.shape | None) if self.content is None else self.content


class Parsed(FieldType, frozen=True):
    """Value parsed by a function from JSON of any size. content: its schema."""

    parse: Reader
    content: Schema

    def reader(self, name: str) -> Reader:
        return self.parse

    def schema(self) -> Schema:
        return self.content


def sized(name: str, raw: Raw, most: int = MAX_FIELD_BYTES) -> Raw:
    """Return the JSON of a field.

    Raises ApiError 400 for more than `most` bytes.
    """
    if (size := len(memoryview(raw))) > most:
        raise unsupported(f"{{param}} has {size} bytes of JSON; at most {most} are allowed", name)
    return raw


def _check_items(name: str, expected: str, values: Sequence[object], item_type: type) -> None:
    for index, item in enumerate(values):
        if type(item) is not item_type:
            raise malformed(f"{{param}} must be {expected}; its element {index} is {type_name(item)}", name)


def _as_written(number: float) -> float:
    """Return an integral number as an int, which JSON writes without a fraction."""
    return int(number) if float(number).is_integer() else number


_MAX_NEUTRAL_BYTES = 64
"""Maximum bytes of JSON to compare with the neutral values of an ignored field."""


class Unsupported(CheckedType, frozen=True):
    """Refused field that would change the output.

    Null and the neutral values in `accepted` are allowed.
    """

    accepted: tuple[Any, ...] = ()
    hint: str = ""
    """Sentence appended to the error message."""

    def check(self, name: str, value: Any) -> None:
        if not any(type(value) is type(known) and value == known for known in self.accepted):
            raise _only(name, self.accepted, self.hint)

    def schema(self) -> Schema:
        # 1 and 1.0 are the same number in JSON.
        return constant(*(value for index, value in enumerate(self.accepted) if value not in self.accepted[:index]))


class Ignored(FieldType, frozen=True):
    """Ignored field that does not change the output.

    It must be valid JSON, is not decoded, and is recorded as ignored. Values in `accepted` are equivalent to an absent
    field and not recorded. With `never_refused` all values are accepted even if ignored fields are refused.
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
