"""Fields without effect: found at any depth, recorded once, named in a header of bounded size."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.responses.request import parse_responses
from tandem.frontend.errors import ApiError
from tandem.frontend.request.extra_fields import IGNORED_PATHS, NO_EFFECT_FIELDS, OTHER, REFUSED_FIELDS, ignored_label
from tandem.frontend.request.ignored_fields import MAX_HEADER_BYTES, MAX_HEADER_NAMES, MAX_RECORDED, IgnoredFields
from tandem.frontend.request.known_names import MAX_NAMES, split_object
from tandem.frontend.request.values import TypedDecoder

USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "arguments": "{}"}
CALL = {"id": "1", "type": "function", "function": LOOK}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "unheard": 1}}}


class Leaf(Struct, tag_field="type", tag="leaf"):
    size: int = 0
    inner: "dict[str, Any] | None" = None


class Stone(Struct, tag_field="type", tag="stone"):
    weight: int = 0


class Garden(Struct):
    things: list[Leaf | Stone] | str = ""
    best: Leaf | None = None


GARDEN = TypedDecoder(Garden | list[Garden])


def chat_ignores(**fields: Any) -> tuple[str, ...]:
    ignored = IgnoredFields()
    parse_chat(msgspec.json.encode({"model": "m", "messages": [USER], **fields}), 16, ignored)
    return ignored.paths


def garden_ignores(value: Any) -> tuple[str, ...]:
    ignored = IgnoredFields()
    GARDEN.read(msgspec.json.encode(value), "garden", ignored)
    return ignored.paths


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({}, ()),
        ({"unheard": 1, "unseen": None}, ("unheard", "unseen")),
        ({"user": "x"}, ("user",)),
        ({"store": False, "service_tier": "auto"}, ()),
        ({"store": True, "service_tier": "flex"}, ("service_tier", "store")),
        ({"stream": True, "stream_options": {"include_usage": True, "x": 1}}, ("stream_options.x",)),
        ({"messages": [{**USER, "cache_control": {}}, {**USER, "cache_control": {}, "id": "2"}]},
         ("messages[].cache_control", "messages[].id")),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]}]},
         ("messages[].content[].cache_control",)),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "x": 1, "function": {**LOOK, "y": 2}}]}]},
         ("messages[].tool_calls[].x", "messages[].tool_calls[].function.y")),
        ({"tools": [{**TOOL, "cache_control": {}}]}, ("tools[].cache_control",)),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look", "z": 1}}},
         ("tool_choice.function.z",)),
    ],
)  # fmt: skip
def test_chat_records_fields_without_effect(fields: dict[str, Any], paths: tuple[str, ...]) -> None:
    assert sorted(chat_ignores(**fields)) == sorted(paths)


def test_response_records_names_within_items() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}], "y": 2},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "z": 3},
    ]
    ignored = IgnoredFields()
    parse_responses(msgspec.json.encode({"model": "m", "input": items}), 16, ignored)
    assert set(ignored.paths) == {"input[].y", "input[].content[].x", "input[].z"}


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ({"things": [{"type": "leaf", "size": 1}, {"type": "stone", "size": 1}]}, ("garden.things[].size",)),
        ({"things": "none", "best": {"type": "leaf", "inner": {"x": 1}, "y": 1}}, ("garden.best.y",)),
        ([{"a": 1}, {"best": None, "b": 2}], ("garden[].a", "garden[].b")),
        ({"things": []}, ()),
    ],
)
def test_decoder_records_names_that_a_type_lacks(value: Any, paths: tuple[str, ...]) -> None:
    assert garden_ignores(value) == paths


def test_refusing_ends_at_the_first_unknown_name_with_its_index() -> None:
    with pytest.raises(ApiError) as caught:
        GARDEN.read(b'[{}, {"things": [{"type": "stone", "size": 1}]}]', "garden", IgnoredFields(refuse=True))
    assert (caught.value.status, caught.value.code) == (400, "unknown_parameter")
    assert caught.value.param == "garden[1].things[0].size"


def test_paths_are_recorded_once_without_indices_up_to_a_bound() -> None:
    ignored = IgnoredFields()
    for index in range(3):
        ignored.add(f"messages[{index}].content[{index}].x")
    assert ignored.paths == ("messages[].content[].x",)
    for index in range(1000):
        ignored.add(f"field{index}")
    assert len(ignored.paths) == MAX_RECORDED


def test_header_has_bounded_names_and_bytes() -> None:
    ignored = IgnoredFields()
    for index in range(20):
        ignored.add(f"f{index}")
    assert ignored.header() == b",".join(b"f%d" % index for index in range(MAX_HEADER_NAMES))
    long = IgnoredFields()
    for index in range(20):
        long.add(f"{index}" + "x" * 300)
    assert 0 < len(long.header()) <= MAX_HEADER_BYTES


@given(st.lists(st.text(max_size=200), max_size=40))
def test_header_is_safe_whatever_clients_send(names: list[str]) -> None:
    ignored = IgnoredFields()
    for name in names:
        ignored.add(name)
    header = ignored.header()
    assert len(header) <= MAX_HEADER_BYTES
    assert header.count(b",") < MAX_HEADER_NAMES
    assert all(character in b"_.$[]-," or chr(character).isalnum() for character in header)


def test_an_object_of_names_alone_is_not_split_to_its_end() -> None:
    body = msgspec.json.encode({f"name{index}": index for index in range(10 * MAX_NAMES)})
    fields = split_object(body)
    assert len(fields) == MAX_NAMES + 1
    assert not any(bytes(value) for value in fields.values())
    few = split_object(b'{"a": 1, "b": [2]}')
    assert {name: bytes(value) for name, value in few.items()} == {"a": b"1", "b": b"[2]"}


def test_labels_are_those_of_the_tables() -> None:
    for name in (*(field.name for field in NO_EFFECT_FIELDS), *(path for path, _ in IGNORED_PATHS), "user"):
        assert ignored_label(name) == name
    assert {ignored_label(name) for name in ("unheard", "messages[].unheard", "model", "")} == {OTHER}


@pytest.mark.parametrize("name", [field.name for field in REFUSED_FIELDS])
def test_fields_that_would_change_the_output_are_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_ignores(**{name: {"any": "value"}})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", name)
    assert chat_ignores(**{name: None}) == ()
