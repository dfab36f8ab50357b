"""Reading a JSON body field by field: what is wrong is named, and nothing is accepted and then ignored."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from tandem.frontend.errors import ApiError, malformed, unsupported

_TYPE_NAMES: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", bool: "a boolean",
    int: "an integer", float: "a number", type(None): "null",
}  # fmt: skip

IGNORED = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)
"""Fields that cannot change the output, whatever they hold. They are checked to be JSON and never built."""

MAX_FIELD_BYTES = 256 * 1024
"""Most JSON of one field, prompts and ignored ones aside: more than any value in bounds needs, and built quickly."""

_UNKNOWN_FIELD = "Object contains unknown field `"
_PLACE = re.compile(r"^(.*?) - at `\$(.*)`$", re.DOTALL)


class BodyFormat:
    """Splits a JSON object into the JSON of its fields, all of whose names are known beforehand.

    Nothing is built of what a field holds before somebody takes it, and the first unknown name ends it, so a body
    costs no more than one look at its bytes.
    """

    def __init__(self, names: Iterable[str]) -> None:
        fields = [(name, Raw, Raw()) for name in dict.fromkeys((*IGNORED, *names))]
        shape = msgspec.defstruct("Body", fields, forbid_unknown_fields=True)
        self._decoder = msgspec.json.Decoder(shape)

    def split(self, body: bytes) -> dict[str, Raw]:
        """The fields that are there. Raises ApiError 400 for what is no JSON object, 422 for an unknown field."""
        try:
            fields = msgspec.structs.asdict(self._decoder.decode(body))
        except RecursionError:
            raise malformed("the body is nested too deeply") from None
        except msgspec.ValidationError as error:
            text = str(error)
            if text.startswith(_UNKNOWN_FIELD):
                raise not_supported(text.removeprefix(_UNKNOWN_FIELD).removesuffix("`")) from None
            raise malformed(f"the body must be a JSON object: {error}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise malformed(f"the body is no valid JSON: {error}") from None
        return {name: raw for name, raw in fields.items() if len(memoryview(raw))}


def decode_field(raw: bytes | Raw, name: str, shape: Any = Any) -> Any:
    """The value of a field. Raises ApiError 400 where it cannot be read, ValidationError for another shape."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # Of any shape at all a value is invalid only as a number that no float can hold.
        if isinstance(error, msgspec.ValidationError) and shape is not Any:
            raise
        raise malformed(f"{name!r} is no valid JSON: {error}", name) from None


def not_supported(name: str) -> ApiError:
    """422 for a field that nobody knows."""
    return unsupported(f"the field {name[:100]!r} is not supported", name[:100])


def type_name(value: object) -> str:
    """What JSON calls the type of this value."""
    return _TYPE_NAMES.get(type(value), "a value of another type")


def wrong_type(name: str, expected: str, value: object) -> ApiError:
    return malformed(f"{name!r} must be {expected}, not {type_name(value)}", name)


def misshapen(error: msgspec.ValidationError, field: str) -> ApiError:
    """What msgspec found wrong within a field, with the place of it: 422 for unknown names and values, else 400."""
    text = str(error)
    found = _PLACE.match(text)
    reason, place = (found[1], field + found[2]) if found else (text, field)
    if reason.startswith(_UNKNOWN_FIELD):
        return not_supported(f"{place}.{reason.removeprefix(_UNKNOWN_FIELD).removesuffix('`')}")
    if reason.startswith("Invalid "):
        hint = "; this server takes text alone" if ".content[" in place else ""
        return unsupported(f"{place!r}: {reason[0].lower()}{reason[1:200]} is not supported{hint}", place)
    if reason.startswith("Expected `null`"):
        return unsupported(f"{place!r} is not supported; leave it out", place)
    return malformed(f"{place!r}: {reason[0].lower()}{reason[1:300]}", place)


class FieldReader:
    """Takes the fields of an object by name and type; what nobody took is refused at the end.

    An absent field and a null are the same: the default. Wrong JSON types are 400; values out of range or not
    supported are 422. Both name the field.
    """

    def __init__(self, body: Mapping[str, Raw]) -> None:
        self._body = body
        self._taken: set[str] = set(IGNORED)

    def raw(self, name: str) -> Raw | None:
        """The JSON of a field, of whatever size."""
        self._taken.add(name)
        return self._body.get(name)

    def sized(self, name: str) -> Raw | None:
        """The JSON of a field of ordinary size. Raises ApiError 422 for more."""
        raw = self.raw(name)
        if raw is None:
            return None
        if (size := len(memoryview(raw))) > MAX_FIELD_BYTES:
            raise unsupported(f"{name!r} has {size} bytes of JSON, at most {MAX_FIELD_BYTES}", name)
        return raw

    def take(self, name: str) -> Any:
        raw = self.sized(name)
        return None if raw is None else decode_field(raw, name)

    def required_text(self, name: str) -> str:
        value = self.take(name)
        if value is None:
            raise malformed(f"the field {name!r} is required", name)
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name)
        if value is None:
            return default
        # JSON has one kind of number, and some clients write 16 as 16.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise wrong_type(name, "an integer", value)
        if not low <= value <= high:
            raise unsupported(f"{name!r} must be between {low} and {high}, not {value}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float, above_low: bool = False) -> float:
        """A finite number from low to high; with `above_low`, low itself is excluded."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise wrong_type(name, "a number", value)
        if not low <= value <= high or (above_low and value == low) or not math.isfinite(value):
            bounds = f"above {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            raise unsupported(f"{name!r} must be {bounds}, not {value}", name)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise wrong_type(name, "a boolean", value)
        return value

    def text(self, name: str, longest: int) -> str | None:
        """A string of 1 to `longest` characters, or None."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        if not 1 <= len(value) <= longest:
            raise unsupported(f"{name!r} must have 1 to {longest} characters, not {len(value)}", name)
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        return value

    def shaped(self, name: str, shape: Any) -> Any:
        """A value of a msgspec type, or None. What does not fit is refused with its place within the field."""
        raw = self.sized(name)
        if raw is None or bytes(memoryview(raw)) == b"null":
            return None
        try:
            return decode_field(raw, name, shape)
        except msgspec.ValidationError as error:
            raise misshapen(error, name) from None

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """A string or an array of at most `most`, each of 1 to `longest` characters."""
        value = self.take(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise wrong_type(name, "a string or an array of strings", value)
        _check_items(name, "a string or an array of strings", values, str)
        if len(values) > most:
            raise unsupported(f"{name!r} takes at most {most} strings, not {len(values)}", name)
        for item in values:
            if not 1 <= len(item) <= longest:
                raise unsupported(f"a string in {name!r} must have 1 to {longest} characters, not {len(item)}", name)
        return tuple(values)

    def ids(self, name: str, most: int) -> tuple[int, ...]:
        """An array of at most `most` token ids."""
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise wrong_type(name, "an array of token ids", value)
        _check_items(name, "an array of token ids", value, int)
        if len(value) > most:
            raise unsupported(f"{name!r} takes at most {most} ids, not {len(value)}", name)
        return tuple(value)

    def biases(self, name: str, most: int) -> dict[int, float]:
        """An object from token id to a bias between -100 and 100."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        if len(value) > most:
            raise unsupported(f"{name!r} takes at most {most} tokens, not {len(value)}", name)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise unsupported(f"the keys of {name!r} must be token ids, not {key[:40]!r}", name)
            if type(bias) not in (int, float):
                raise malformed(f"the values of {name!r} must be numbers, not {type_name(bias)}", name)
            if not -100 <= bias <= 100:
                raise unsupported(f"the values of {name!r} must be between -100 and 100, not {bias}", name)
            biases[int(key)] = float(bias)
        return biases

    def neutral(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Fields that are not supported, yet accepted with a value that changes nothing (null is one always)."""
        for name, values in table.items():
            value = self.take(name)
            if value is not None and not any(type(value) is type(known) and value == known for known in values):
                allowed = ", ".join(["null", *(msgspec.json.encode(known).decode() for known in values)])
                raise unsupported(f"{name!r} is not supported; only {allowed} is accepted", name)

    def finish(self) -> None:
        """Refuses, by name, whatever was not taken."""
        for name in self._body:
            if name not in self._taken:
                raise not_supported(name)


def _check_items(name: str, expected: str, values: Sequence[object], kind: type) -> None:
    for index, item in enumerate(values):
        if type(item) is not kind:
            raise malformed(f"{name!r} must be {expected}; its element {index} is {type_name(item)}", name)
