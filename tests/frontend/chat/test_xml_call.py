"""Parse calls written as XML: types of arguments, several calls, malformed and truncated ones, at every cut."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.message import CallArguments, CallStart, Content, MessageDelta, join_deltas
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.chat.xml_call import json_value
from tandem.frontend.grammar.tool_calls import QWEN3_CODER

POINT = {"type": "object", "properties": {"x": {"type": "number"}}}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "items": {"type": "array"},
    "point": {"$ref": "#/$defs/point"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "several": {"type": ["integer", "boolean", "null"]},
    "kind": {"enum": ["a", "b"]},
    "any": {},
}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "look": {"type": "object", "properties": PROPERTIES, "$defs": {"point": POINT}},
    "add": None,
}
Read = tuple[str | None, list[tuple[str, str]]]
"""Content and calls of a message."""


def read(*chunks: str, parallel: bool = True, required: bool = False) -> Read:
    parser = ToolParser(FORMATS["qwen3_coder"], SCHEMAS.keys(), parallel, required, schemas=SCHEMAS)
    deltas: list[MessageDelta] = [delta for chunk in chunks for delta in parser.push(chunk)]
    message = join_deltas([*deltas, *parser.finish()])
    return message.content, [(call.name, call.arguments) for call in message.calls]


def call(name: str, **parameters: str) -> str:
    elements = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("text", "plain", "plain"),
        ("text", "", ""),
        ("text", "\n", "\n"),
        ("text", "\n two\n\nlines \n", "\n two\n\nlines \n"),
        ("text", '"quoted" \\n \t ü 🌊 \x7f', '"quoted" \\n \t ü 🌊 \x7f'),
        ("text", "12", "12"),
        ("text", "null", "null"),
        ("text", "True", "True"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "a <b> </parameter> <parameter> </p", "a <b> </parameter> <parameter> </p"),
        ("text", "<parameter=x>\n1\n</parameter>\nand so on", "<parameter=x>\n1\n</parameter>\nand so on"),
        ("text", "<think><tool_call></tool_call></think>", "<think><tool_call></tool_call></think>"),
        ("count", "12", 12),
        ("count", " -3\n", -3),
        ("count", "5.0", 5.0),
        ("count", "5.5", "5.5"),
        ("count", "five", "five"),
        ("count", "true", "true"),
        ("count", "", ""),
        ("count", "123456789012345678901234567890", 123456789012345678901234567890),
        ("ratio", "1", 1),
        ("ratio", "-0.5e3", -500.0),
        ("ratio", "NaN", "NaN"),
        ("ratio", "Infinity", "Infinity"),
        ("ratio", "1,5", "1,5"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("flag", "1", "1"),
        ("nothing", "null", None),
        ("nothing", "None", None),
        ("nothing", "x", "x"),
        ("items", '[1, "a", {"b": null}]', [1, "a", {"b": None}]),
        ("items", "[\n  1,\n  2\n]", [1, 2]),
        ("items", "1, 2", "1, 2"),
        ("items", '{"a": 1}', '{"a": 1}'),
        ("point", '{"x": 1.5}', {"x": 1.5}),
        ("point", "{'x': 1.5}", "{'x': 1.5}"),
        ("point", "[1]", "[1]"),
        ("maybe", "null", None),
        ("maybe", "text", "text"),
        ("maybe", "7", "7"),
        ("several", "7", 7),
        ("several", "TRUE", True),
        ("several", "null", None),
        ("several", "text", "text"),
        ("kind", "a", "a"),
        ("any", "7", 7),
        ("any", '"text"', "text"),
        ("any", "text", "text"),
        ("any", "[1", "[1"),
        ("any", "null", None),
        ("unknown", '{"a": [true]}', {"a": [True]}),
        ("unknown", "two\nlines", "two\nlines"),
        ("unknown", "NaN", "NaN"),
    ],
)
def test_arguments_have_the_types_of_the_schema(parameter: str, value: str, expected: object) -> None:
    content, ((name, arguments),) = read(call("look", **{parameter: value}))
    assert (content, name) == (None, "look")
    (found,) = json.loads(arguments).items()
    assert found == (parameter, expected)
    assert type(found[1]) is type(expected)


TWO = call("look", text="a\n\nb", count="2") + "\n" + call("add", x="[1]", y="z")
TWO_CALLS = [("look", '{"text": "a\\n\\nb", "count": 2}'), ("add", '{"x": [1], "y": "z"}')]
EXPECTED: list[tuple[str, Read]] = [
    (TWO, (None, TWO_CALLS)),
    (f"I look.\n\n{TWO}\n", ("I look.", TWO_CALLS)),
    (f"a <function=look> b\n{call('add')}\nc {call('add')} d", ("a <function=look> b\nc d", [("add", "{}")] * 2)),
    ("<tool_call><function=look><parameter=text>in line</parameter></function></tool_call>",
     (None, [("look", '{"text": "in line"}')])),
    ("<tool_call>\n<function=look>\n<parameter=text>\nmixed</parameter>\n<parameter=count>3\n</parameter></function>\n",
     (None, [("look", '{"text": "mixed", "count": 3}')])),
    ("<tool_call>\n<function=add>\n\n</function>\n</tool_call>", (None, [("add", "{}")])),
    # Without the end of the function.
    ("<tool_call>\n<function=add>\n</tool_call>\nx", ("\nx", [("add", "{}")])),
    ("<tool_call>\n<function=look>\n<parameter=text>\na\n</parameter>\n</tool_call>\n" + call("add"),
     (None, [("look", '{"text": "a"}'), ("add", "{}")])),
    # Without the end of the last parameter.
    ("<tool_call>\n<function=look>\n<parameter=count>\n1\n</function>\n</tool_call>\nbye",
     ("\nbye", [("look", '{"count": 1}')])),
    ("<tool_call>\n<function=look>\n<parameter=text>\na\n</function>\n</function></tool_call>\n" + call("add"),
     (None, [("look", '{"text": "a\\n</function>"}'), ("add", "{}")])),
    # Several functions in one pair of tags.
    (TWO.replace("</tool_call>\n<tool_call>", ""), (None, TWO_CALLS)),
    ("<tool_call>\n<function=add>\n</function>\n<function=other>\n</tool_call>",
     ("\n<function=other>\n</tool_call>", [("add", "{}")])),
    # Without the end of the call.
    ("<tool_call>\n<function=add>\n</function>\n" + call("add"), (None, [("add", "{}")] * 2)),
    ("<tool_call>\n<function=add>\n</function> so", (" so", [("add", "{}")])),
    # A function after the end of the call needs a tag of its own.
    (call("add") + "<function=look>\n</function>", ("<function=look>\n</function>", [("add", "{}")])),
    # A name that repeats is passed on, and the last value counts for JSON.
    (call("look", text="a").replace("</function>", "<parameter=text>\nb\n</parameter>\n</function>"),
     (None, [("look", '{"text": "a", "text": "b"}')])),
    # JSON in the same tags, as of other models of the family.
    ('<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', (None, [("add", '{"x": 1}')])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), EXPECTED)
def test_calls_are_parsed_at_every_cut(text: str, expected: Read) -> None:
    content, calls = expected
    whole = read(text)
    assert (whole[0] or None, whole[1]) == (content, calls)
    assert read(*text) == whole
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == whole
        assert read(*text[:cut]) == read(text[:cut])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nno call\n</tool_call>",
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look",
        "<tool_call>\n<function=look>",
        "<tool_call>\n<function=look>\n<parameter=te",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function>look</function>\n</tool_call>",
        "<tool_call>\n<function=lo\nok>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\ntext\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter>text</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n<function={'look' * 100}>\n</function>\n</tool_call>",
        f"<tool_call>\n<function=look>{' ' * 99}</function>\n</tool_call>",
        "<function=look>\n</function>",
        "<tool_call></tool_call>",
        "<tool_call>\n<tool_call",
    ],
)
def test_malformed_calls_are_content_unchanged(text: str) -> None:
    assert read(text) == read(*text) == (text, [])
    content, calls = read(f"{text}\n{call('add')}")
    assert content is not None
    assert content.strip() == text
    assert calls == [("add", "{}")]


def test_a_truncated_call_keeps_its_arguments_so_far() -> None:
    text = f"I look.\n{call('look', text='a <b>', count='12')}"
    expected = '{"text": "a <b>", "count": 12}'
    seen = []
    for end in range(text.index("<tool_call>"), len(text) + 1):
        content, calls = read(text[:end])
        assert read(*text[:end]) == (content, calls)
        if calls:
            ((name, arguments),) = calls
            assert (content, name) == ("I look.", "look")
            assert expected.startswith(arguments)
            seen.append(arguments)
        else:
            assert content is not None
            assert text.startswith(content)
    assert list(dict.fromkeys(seen)) == [
        *(f'{{"text": "{value}' for value in ("", "a", "a ", "a <b", "a <b>")),
        '{"text": "a <b>", "count": ',
        expected,
    ]


def test_a_truncated_required_call_never_becomes_content() -> None:
    shown: list[list[tuple[str, str]]] = []
    for end in range(len(TWO) + 1):
        content, calls = read(TWO[:end], required=True)
        assert not content
        assert read(*TWO[:end], required=True) == (content, calls)
        if not shown or shown[-1] != calls:
            shown.append(calls)
    assert shown[:3] == [[], [("look", "")], [("look", '{"text": "')]]
    assert shown[-1] == TWO_CALLS


def test_only_the_first_call_is_kept_without_parallel_calls() -> None:
    assert read(TWO, parallel=False) == (None, TWO_CALLS[:1])


def test_strings_stream_as_they_arrive_and_other_values_at_their_end() -> None:
    parser = ToolParser(FORMATS["qwen3_coder"], SCHEMAS.keys(), schemas=SCHEMAS)
    assert parser.push("Hm.\n<tool_call>\n<function=look>\n<param") == [Content("Hm.")]
    start, opened = parser.push("eter=text>\n")
    assert isinstance(start, CallStart)
    assert (start.index, start.name, start.id[:5], opened) == (0, "look", "call_", CallArguments(0, '{"text": "'))
    assert parser.push('the "mo') == [CallArguments(0, 'the \\"mo')]
    assert parser.push("on\n") == [CallArguments(0, "on")]
    assert parser.push("</par") == []
    assert parser.push("ameter>\n<parameter=count>\n1") == [CallArguments(0, '", "count": ')]
    assert parser.push("2\n</parameter>") == []
    assert parser.push("\n</function>\n</tool_call>") == [CallArguments(0, "12}")]


def test_a_value_of_a_string_holds_back_little() -> None:
    parser = ToolParser(FORMATS["qwen3_coder"], SCHEMAS.keys(), schemas=SCHEMAS)
    text = "\n".join(["x"] * 100) + "</parameter>" + "\n" * 9999
    deltas = parser.push("<tool_call>\n<function=look>\n<parameter=text>\n")
    for character in text:
        deltas += parser.push(character)
    shown = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))
    assert json.loads(shown + '"}')["text"] + "\n" == text


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=look>", "<function=other>", "<function=", "</function>", "\n", " ",
    "<parameter=text>", "<parameter=count>", "<parameter=any>", "<parameter=", "</parameter>", "</param", "<", ">",
    "text", "12", "[1]", '"', "\\", "{", '{"name": "add"}', " " * 40, call("look", text="a", count="1"), call("add"),
]  # fmt: skip


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[str, Sequence[str]]:
    text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=16)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(chunkings(), st.booleans(), st.booleans())
def test_parsing_does_not_depend_on_the_chunks(cut: tuple[str, Sequence[str]], parallel: bool, required: bool) -> None:
    text, chunks = cut
    whole = read(text, parallel=parallel, required=required)
    assert read(*chunks, parallel=parallel, required=required) == whole
    assert read(*text, parallel=parallel, required=required) == whole


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
STRINGS = {"s": {"type": "object", "additionalProperties": {"type": "string"}}}


@given(st.dictionaries(st.sampled_from("abc"), st.text(st.characters(codec="utf-8"), max_size=30)))
def test_strings_that_are_written_are_read_unchanged(arguments: dict[str, str]) -> None:
    parser = ToolParser(FORMATS["qwen3_coder"], STRINGS.keys(), schemas=STRINGS)
    text = f"<tool_call>\n{QWEN3_CODER.written('s', arguments)}\n</tool_call>"
    message = join_deltas([*[delta for character in text for delta in parser.push(character)], *parser.finish()])
    assert [json.loads(each.arguments) for each in message.calls] == [arguments]


@given(json_values)
def test_json_of_any_type_is_read_unchanged(value: Any) -> None:
    text = json.dumps(value)
    assert json.loads(json_value(text, None)) == value
    kinds = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    if (kind := kinds.get(type(value))) is not None:
        assert json.loads(json_value(text, frozenset((kind, "string")))) == value


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.sets(st.sampled_from(["integer", "array", "null"])))
def test_a_value_is_always_json(text: str, types: set[str]) -> None:
    found = json.loads(json_value(text, frozenset(types)))
    assert found == text or type(found) in (int, float, list, type(None))
