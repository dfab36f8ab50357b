"""Known names of the objects nested in a JSON value.

They are derived from the msgspec type of the value.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct, inspect

from tandem.frontend.request.ignored_fields import IgnoredFields

MAX_NAMES = 1024
"""Maximum number of names of an object that is searched for unknown names."""


class KnownNames(Struct, frozen=True):
    """Known names of the objects nested in a value.

    The value may itself be an object or an array.

    """

    items: "KnownNames | None" = None
    """Names in the elements of an array; None if they have no known objects."""
    tag_field: str = ""
    """Name of the tag field that selects one of `objects`; empty if there is only one."""
    objects: Mapping[str, "Mapping[str, KnownNames | None]"] = {}
    """Names of an object by its tag, "" without a tag; each with the names nested in its value."""

    def report(self, raw: bytes | Raw, path: str, ignored: IgnoredFields) -> None:
        """Record the unknown names nested in a value that matches the type.

        Raises ApiError 400 if unknown fields are refused.

        """
        first = bytes(memoryview(raw)[:1])
        if first == b"[" and self.items is not None:
            for index, item in enumerate(msgspec.json.decode(raw, type=list[Raw])):
                self.items.report(item, f"{path}[{index}]", ignored)
        elif first == b"{" and self.objects:
            fields = split_object(raw)
            known = self._known(fields)
            for name, value in fields.items():
                if name not in known:
                    ignored.add(f"{path}.{name}")
                elif (within := known[name]) is not None:
                    within.report(value, f"{path}.{name}", ignored)

    def _known(self, fields: Mapping[str, Raw]) -> Mapping[str, "KnownNames | None"]:
        """Select the known names of an object by its tag."""
        if not self.tag_field:
            return self.objects[""]
        tag = fields.get(self.tag_field, Raw(b""))
        return self.objects.get(msgspec.json.decode(tag, type=str) if memoryview(tag) else "", {})


def known_names(shape: inspect.Type) -> KnownNames | None:
    """Derive the known names of a type.

    None if its values have no known objects.
    """
    match shape:
        case inspect.Metadata(type=described):
            return known_names(described)
        case inspect.ListType(item_type=item_type):
            items = known_names(item_type)
            return None if items is None else KnownNames(items)
        case inspect.StructType():
            fields = {field.encode_name: known_names(field.type) for field in shape.fields}
            if shape.tag_field is None:
                return KnownNames(objects={"": fields})
            return KnownNames(None, shape.tag_field, {str(shape.tag): {shape.tag_field: None, **fields}})
        case inspect.UnionType(types=types):
            found = [known for member in types if (known := known_names(member)) is not None]
            objects = {tag: names for member in found for tag, names in member.objects.items()}
            tag_field = next((member.tag_field for member in found if member.tag_field), "")
            items = next((member.items for member in found if member.items is not None), None)
            return KnownNames(items, tag_field, objects) if found else None
    return None


def split_object(raw: bytes | Raw) -> dict[str, Raw]:
    """Split a JSON object into the JSON of its fields.

    For an object with more than MAX_NAMES names, which no client sends, only the first names are returned, without
    values, so that a body of names alone is cheap.
    """
    names: list[str] = []

    def read_name(_: type, name: str) -> _Name:
        names.append(name)
        if len(names) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} names")
        return _Name(name)

    try:
        return dict(msgspec.json.decode(raw, type=dict[_Name, Raw], dec_hook=read_name))
    except msgspec.ValidationError:
        return dict.fromkeys(names, Raw(b""))


class _Name(str):
    """Name of a field, for the hook of a decoder."""
