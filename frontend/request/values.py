"""Decode JSON values, with errors for invalid ones."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, inspect

from tandem.frontend.errors import ApiError, malformed, unsupported, unsupported_field
from tandem.frontend.request.ignored_fields import IgnoredFields, unknown_field
from tandem.frontend.request.known_names import known_names

MAX_EXPLAINED_BYTES = 256 * 1024
"""Maximum bytes of a value that is decoded again to find the invalid part."""

_TYPE_NAMES: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", bool: "a boolean",
    int: "an integer", float: "a number", type(None): "null",
}  # fmt: skip

_JSON_TYPES: tuple[tuple[type[inspect.Type], type], ...] = (
    (inspect.StructType, dict), (inspect.DictType, dict), (inspect.ListType, list), (inspect.StrType, str),
    (inspect.BoolType, bool), (inspect.IntType, int), (inspect.FloatType, float), (inspect.NoneType, type(None)),
)  # fmt: skip


def decode_field(raw: bytes | Raw, name: str) -> Any:
    """Decode the JSON of a field.

    Raises ApiError 400 if it is not valid or too deeply nested.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"{{param}} is not valid JSON: {error}", name) from None


class TypedDecoder:
    """Decode JSON as a msgspec type.

    Unknown names are recorded as ignored; a struct with `forbid_unknown_fields` never accepts them.
    """

    def __init__(self, shape: Any) -> None:
        self._shape = shape
        self._decoder = msgspec.json.Decoder(shape)
        self._names = known_names(inspect.type_info(shape))

    def read(self, raw: bytes | Raw, path: str, ignored: IgnoredFields) -> Any:
        """Decode the JSON of the field at `path`, and record names without effect.

        Raises ApiError 400 with the path of an invalid part, or of an unknown name if those are refused.
        """
        value = self.decode(raw, path)
        if self._names is not None:
            self._names.report(raw, path, ignored)
        return value

    def decode(self, raw: bytes | Raw, path: str) -> Any:
        """Decode the JSON of the field at `path`.

        Raises ApiError 400 with the path of an invalid part.
        """
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError:
            size = memoryview(raw).nbytes
            if size > MAX_EXPLAINED_BYTES:
                # Millions of small values take seconds to build, which blocks this process.
                raise malformed(
                    f"{{param}}: a part of its {size} bytes has the wrong type or an unknown name", path
                ) from None
            raise mismatch(decode_field(raw, path), self._shape, path) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(f"{{param}} is not valid JSON: {error}", path) from None


def decode_exact(raw: bytes | Raw, name: str, shape: Any, expected: str) -> Any:
    """Decode the JSON of a field that must match a msgspec type.

    Raises ApiError 400, without a path, if it does not; the message calls the type `expected`.
    """
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError:
        raise malformed(f"{{param}} must be {expected}", name) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"{{param}} is not valid JSON: {error}", name) from None


def type_name(value: object) -> str:
    """Return the JSON type of a value, with its article."""
    return _TYPE_NAMES.get(type(value), "a value of another type")


def wrong_type(name: str, expected: str, value: object) -> ApiError:
    """Return the 400 for a value of the wrong JSON type.

    `expected` is a type with its article.
    """
    return malformed(f"{{param}} must be {expected}, not {type_name(value)}", name)


def mismatch(value: Any, shape: Any, path: str) -> ApiError:
    """Return the error for a decoded value that does not match a msgspec type.

    The error has the path of the invalid part.
    """
    found = _mismatch(value, inspect.type_info(shape), path)
    return found or malformed("{param} holds a value that is out of range", path)


def _mismatch(value: Any, shape: inspect.Type, path: str) -> ApiError | None:
    match shape:
        case inspect.Metadata(type=described):
            return _mismatch(value, described, path)
        case inspect.UnionType():
            return _union_mismatch(value, shape, path)
        case inspect.StructType():
            return _struct_mismatch(value, shape, path)
        case inspect.ListType(item_type=item_type) if isinstance(value, list):
            return _first(_mismatch(item, item_type, f"{path}[{index}]") for index, item in enumerate(value))
        case inspect.DictType(value_type=value_type) if isinstance(value, dict):
            return _first(_mismatch(item, value_type, f"{path}[...]") for item in value.values())
        case inspect.LiteralType(values=values) if isinstance(value, str):
            return None if value in values else _unknown_value(value, values, path)
        case inspect.NoneType() if value is not None:
            return unsupported_field("{param} is not supported; leave it out", path)
        case inspect.StrType(min_length=int(least)) if isinstance(value, str) and len(value) < least:
            return malformed(f"{{param}} must have at least {least} character", path)
        case inspect.AnyType() | inspect.RawType():
            return None
    return None if type(value) is _json_type(shape) else wrong_type(path, _expected([shape]), value)


def _union_mismatch(value: Any, union: inspect.UnionType, path: str) -> ApiError | None:
    members = [member for member in union.types if _json_type(member) is type(value)]
    if not members:
        return wrong_type(path, _expected(union.types), value)
    structs = [member for member in members if isinstance(member, inspect.StructType)]
    if not structs:
        return _mismatch(value, members[0], path)
    tags = {member.tag: member for member in structs}
    tag_field = structs[0].tag_field
    if tag_field is None or tag_field not in value:
        return _missing(str(tag_field), path) if tag_field else _mismatch(value, structs[0], path)
    tag = value[tag_field]
    if not isinstance(tag, str):
        return wrong_type(f"{path}.{tag_field}", "a string", tag)
    return _mismatch(value, tags[tag], path) if tag in tags else _unknown_value(tag, tags, f"{path}.{tag_field}")


def _struct_mismatch(value: Any, struct: inspect.StructType, path: str) -> ApiError | None:
    if not isinstance(value, dict):
        return wrong_type(path, "an object", value)
    types = {field.encode_name: field.type for field in struct.fields}
    if struct.tag_field is not None:
        types[struct.tag_field] = inspect.LiteralType((struct.tag,))
    for name, item in value.items():
        if name in types:
            if found := _mismatch(item, types[name], f"{path}.{name}"):
                return found
        elif struct.forbid_unknown_fields:
            return unknown_field(f"{path}.{name}")
    required = [field.encode_name for field in struct.fields if field.required]
    if struct.tag_field is not None:
        required.append(struct.tag_field)
    return _first(_missing(name, path) for name in required if name not in value)


def _first(errors: Iterable[ApiError | None]) -> ApiError | None:
    return next((error for error in errors if error is not None), None)


def _missing(name: str, path: str) -> ApiError:
    return malformed(f"{{param}}: the required field {name!r} is missing", path)


def _unknown_value(value: str, known: Iterable[object], path: str) -> ApiError:
    hint = "only text" if ".content[" in path else ", ".join(repr(name) for name in known)
    return unsupported(f"{{param}}: {value[:100]!r} is not supported; this server accepts {hint}", path)


def _json_type(shape: inspect.Type) -> type | None:
    if isinstance(shape, inspect.Metadata):
        return _json_type(shape.type)
    if isinstance(shape, inspect.LiteralType):
        return str
    return next((json_type for kind, json_type in _JSON_TYPES if isinstance(shape, kind)), None)


def _expected(shapes: Iterable[inspect.Type]) -> str:
    return " or ".join(dict.fromkeys(_TYPE_NAMES[found] for shape in shapes if (found := _json_type(shape))))
