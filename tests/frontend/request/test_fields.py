"""Tables of request fields: parsing, description, and the errors that name a field."""

from typing import Any, Literal

import jsonschema
import msgspec
import pytest
from msgspec import Struct

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.field_types import (
    Boolean,
    FieldType,
    Integer,
    Number,
    OneOf,
    String,
    Strings,
    Typed,
    Unsupported,
)
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import FLAG_FIELDS, OPTION_FIELDS
from tandem.protocol.params import SAMPLING_FIELDS, SamplingParams


class Leaf(Struct, tag_field="type", tag="leaf", forbid_unknown_fields=True):
    size: int
    color: Literal["red", "green"] = "red"


class Twig(Struct, tag_field="type", tag="twig", forbid_unknown_fields=True):
    leaves: list[Leaf]


TABLE = BodyFormat(
    (
        Field("model", String(), required=True),
        Field("count", Integer(1, 9, 3), "How many."),
        Field("share", Number(0, 1, 0.5, above_minimum=True)),
        Field("stream", Boolean()),
        Field("mode", OneOf(("a", "b"))),
        Field("stop", Strings(2, 4)),
        Field("plant", Typed(Leaf | Twig)),
        Field("store", Unsupported((False,))),
        Field("audio", Unsupported()),
    )
)


def read(**fields: Any) -> dict[str, Any]:
    return TABLE.read(msgspec.json.encode({"model": "m", **fields}), IgnoredFields(refuse=True))


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    return caught.value


def test_body_format_reads_values_and_defaults() -> None:
    defaults = read()
    assert (defaults["count"], defaults["share"], defaults["stream"], defaults["stop"]) == (3, 0.5, False, ())
    values = read(count=4.0, share=1, stop="x", plant={"type": "leaf", "size": 2}, store=False, user={"any": 1})
    assert (values["count"], values["share"], values["stop"], values["plant"]) == (4, 1.0, ("x",), Leaf(2))
    assert read(count=None, plant=None) == defaults


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"other": 1}, 400, "other"), ({"count": 10}, 400, "count"), ({"count": "4"}, 400, "count"),
        ({"share": 0}, 400, "share"), ({"mode": "c"}, 400, "mode"), ({"stop": ["a"] * 3}, 400, "stop"),
        ({"store": True}, 400, "store"), ({"audio": {}}, 400, "audio"), ({"model": None}, 400, "model"),
        ({"plant": 3}, 400, "plant"), ({"plant": {}}, 400, "plant"), ({"plant": {"type": "root"}}, 400, "plant.type"),
        ({"plant": {"type": 3}}, 400, "plant.type"), ({"plant": {"type": "leaf"}}, 400, "plant"),
        ({"plant": {"type": "leaf", "size": 1, "age": 2}}, 400, "plant.age"),
        ({"plant": {"type": "leaf", "size": 1.5}}, 400, "plant.size"),
        ({"plant": {"type": "leaf", "size": 1, "color": "blue"}}, 400, "plant.color"),
        ({"plant": {"type": "twig", "leaves": [{"type": "leaf", "size": 1}, 2]}}, 400, "plant.leaves[1]"),
    ],
)  # fmt: skip
def test_body_format_rejects_invalid_fields_with_their_path(fields: dict[str, Any], status: int, param: str) -> None:
    error = error_of(**fields)
    assert (error.status, error.param) == (status, param)
    assert repr(param) in error.message
    # The schema leaves room for unknown fields, which are ignored unless they are refused.
    assert jsonschema.Draft202012Validator(TABLE.schema()).is_valid({"model": "m", **fields}) == (param == "other")


def test_body_schema_describes_the_documented_fields() -> None:
    schema = TABLE.schema()
    assert (schema["required"], "additionalProperties" in schema) == (["model"], False)
    assert schema["properties"]["count"] == {
        "type": ["integer", "null"], "minimum": 1, "maximum": 9, "default": 3, "description": "How many."
    }  # fmt: skip
    assert schema["properties"]["audio"] == {"enum": [None]}
    valid = {"model": "m", "share": 0.1, "plant": {"type": "twig", "leaves": [{"type": "leaf", "size": 1}]}}
    jsonschema.validate(valid, schema)


def test_every_sampling_field_is_an_option_with_its_own_bounds_and_flag() -> None:
    table = {field.name: field for field in OPTION_FIELDS}
    for sampling in SAMPLING_FIELDS:
        field = table[sampling.name]
        field_type: FieldType = field.type
        assert isinstance(field_type, Integer if sampling.is_integer else Number)
        assert (field_type.maximum, field_type.absent) == (sampling.maximum, None)
        assert field in FLAG_FIELDS
        assert field.help
        assert sampling.name in SamplingParams.__struct_fields__


def test_error_is_renamed_to_the_fields_of_a_route() -> None:
    names = {"format.schema": "text.schema", "format": "text"}
    error = unsupported("{other} and {param} exclude each other", "format.schema.x", "format").renamed(names)
    assert (error.message, error.param) == ("'text' and 'text.schema.x' exclude each other", "text.schema.x")
    assert (error.status, error.code) == (400, "invalid_value")
    other = malformed("{param} is malformed", "formats")
    assert (other.renamed(names).message, other.renamed(names).param) == ("'formats' is malformed", "formats")
