"""Parsing tool calls from text, independently of how the text is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.message import (
    CallArguments,
    CallStart,
    Content,
    Message,
    MessageDelta,
    join_deltas,
)
from tandem.frontend.chat.tool_formats import FORMATS, MODEL_FORMATS, tool_format_name
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.generation.output_tags import MAX_BLANKS

NAMES = frozenset(("look", "add"))
LOOK = '{"name": "look", "arguments": {"at": "the \\"moon\\" {"}}'
AT = '{"at": "the \\"moon\\" {"}'
AT_1 = '{"at": 1}'
ADD = '{"arguments": {"a": [1, {"b": 2}]}, "name": "add"}'
A = '{"a": [1, {"b": 2}]}'


def read(form: str, *chunks: str, parallel: bool = True, required: bool = False) -> Message:
    parser = ToolParser(FORMATS[form], NAMES, parallel, required)
    deltas: list[MessageDelta] = [delta for chunk in chunks for delta in parser.push(chunk)]
    deltas += parser.finish()
    check_order(deltas)
    return join_deltas(deltas)


def check_order(deltas: list[MessageDelta]) -> None:
    """Check that each call starts before its arguments, and that calls do not interleave."""
    begun = -1
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == begun + 1
            assert delta.id
            begun += 1
        elif isinstance(delta, CallArguments):
            assert delta.index == begun
            assert delta.text
        else:
            assert isinstance(delta, Content)
            assert delta.text


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "expected"),
    [
        ("hermes", f"<tool_call>\n{LOOK}\n</tool_call>", None, [("look", AT)]),
        ("hermes", f"<tool_call>{LOOK}</tool_call>", None, [("look", AT)]),
        ("hermes", f"I look.\n\n<tool_call>\n{ADD}\n</tool_call>\n", "I look.", [("add", A)]),
        (
            "hermes",
            f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
            None,
            [("look", AT), ("add", A)],
        ),
        ("hermes", f"<tool_call>{LOOK}</tool_call> and more", " and more", [("look", AT)]),
        ("hermes", '<tool_call>{"name": "look"}</tool_call>', None, [("look", "{}")]),
        ("hermes", '<tool_call>{"name": "look", "arguments": null}</tool_call>', None, [("look", "{}")]),
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"at\\": 1}"}</tool_call>', None, [("look", AT_1)]),
        ("hermes", '<tool_call>{"id": 7, "name": "look", "arguments": {}, "x": 1}</tool_call>', None, [("look", "{}")]),
        ("llama3_json", '{"name": "look", "parameters": {"at": 1}}', None, [("look", '{"at": 1}')]),
        (
            "llama3_json",
            '{"name": "look", "parameters": {}}; {"name": "add", "parameters": {}}',
            None,
            [("look", "{}"), ("add", "{}")],
        ),
        (
            "llama3_json",
            '\n{"name": "look", "parameters": {}}\n{"name": "add", "parameters": {}}\n',
            None,
            [("look", "{}"), ("add", "{}")],
        ),
        ("mistral", f"[TOOL_CALLS] [{LOOK}, {ADD}]", None, [("look", AT), ("add", A)]),
        ("mistral", f"[TOOL_CALLS][{LOOK}]", None, [("look", AT)]),
        ("mistral", f"Well. [TOOL_CALLS] [{LOOK}] ", "Well.", [("look", AT)]),
        ("json", f"[{LOOK}, {ADD}]", None, [("look", AT), ("add", A)]),
        ("json", f"{LOOK}\n{ADD}", None, [("look", AT), ("add", A)]),
        ("json", '{"name": "look", "parameters": {"at": 1}}', None, [("look", '{"at": 1}')]),
    ],
)  # fmt: skip
def test_calls_are_parsed_in_each_format(
    form: str, text: str, content: str | None, expected: list[tuple[str, str]]
) -> None:
    message = read(form, text)
    assert message.content == content
    assert calls(message) == expected
    for _, arguments in expected:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", ""),
        ("hermes", "  \n"),
        ("hermes", "A plain answer, with <tags> and {braces}."),
        ("hermes", "ends like <tool_"),
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", "<tool_call>\n[1, 2]\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": "no"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "argu'),
        ("hermes", '<tool_call>{"name" "look"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "name": "add"}</tool_call>'),
        ("llama3_json", '{"title": "no call"}'),
        ("llama3_json", 'Text before {"name": "look", "parameters": {}}'),
        ("llama3_json", '{"name": "look", '),
        ("mistral", "[TOOL_CALLS] look"),
        ("mistral", "[TOOL_CALLS]"),
        ("json", "[1, 2, 3]"),
        ("json", "[[" + LOOK),
        ("json", "{}"),
    ],
)
def test_text_that_is_not_a_call_is_content_unchanged(form: str, text: str) -> None:
    message = read(form, text)
    assert message.calls == []
    assert message.content == text


def test_truncated_call_keeps_the_arguments_so_far() -> None:
    message = read("hermes", '<tool_call>{"name": "look", "arguments": {"at": "the mo')
    assert calls(message) == [("look", '{"at": "the mo')]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>"),
        ("llama3_json", LOOK.replace("arguments", "parameters") + "; " + ADD.replace("arguments", "parameters")),
        ("mistral", f"[TOOL_CALLS][{LOOK}, {ADD}]"),
        ("json", f"{LOOK}\n{ADD}"),
    ],
)
def test_truncated_required_call_never_becomes_content(form: str, text: str) -> None:
    shown: list[list[tuple[str, str]]] = []
    for end in range(len(text) + 1):
        message = read(form, text[:end], required=True)
        assert message.content in (None, "")
        if not shown or shown[-1] != calls(message):
            shown.append(calls(message))
        chunked = read(form, *text[:end], required=True)
        assert (chunked.content, calls(chunked)) == (message.content, calls(message))
    # The first has its name first, the second its arguments.
    assert shown[:3] == [[], [("look", "")], [("look", "{")]]
    assert [("look", AT), ("add", A)] in shown
    assert shown[-1] == [("look", AT), ("add", A)]


def test_required_call_with_truncated_name_is_dropped() -> None:
    assert read("hermes", '<tool_call>\n{"name": "lo', required=True) == Message("", None, [])
    assert read("hermes", f"<tool_call>{LOOK}</tool_call>\n<tool_", required=True).content is None


def test_text_after_an_unclosed_call_is_content() -> None:
    message = read("hermes", f"<tool_call>{LOOK[:-1]} oops</tool_call>")
    assert calls(message) == [("look", AT)]
    assert message.content == "oops</tool_call>"
    message = read("json", f"[{LOOK}, nothing]")
    assert calls(message) == [("look", AT)]
    assert message.content == ", nothing]"


def test_only_the_first_call_is_kept_without_parallel_calls() -> None:
    for form, text in (
        ("hermes", f"<tool_call>{LOOK}</tool_call><tool_call>{ADD}</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{LOOK}, {ADD}]"),
    ):
        message = read(form, text, parallel=False)
        assert calls(message) == [("look", AT)]
        assert message.content is None


def test_arguments_stream_as_they_arrive() -> None:
    parser = ToolParser(FORMATS["hermes"], NAMES)
    assert parser.push('Hm.\n<tool_call>{"name": "look", "argu') == [Content("Hm.")]
    assert parser.num_calls == 0
    start, first = parser.push('ments": {"at"')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, start.id[:5]) == (0, "look", "call_")
    assert first == CallArguments(0, '{"at"')
    assert parser.push(": 1") == [CallArguments(0, ": 1")]
    assert parser.push("}}\n</tool_call>") == [CallArguments(0, "}")]
    assert parser.num_calls == 1


def test_call_ids_follow_their_format() -> None:
    (call,) = read("mistral", f"[TOOL_CALLS][{LOOK}]").calls
    assert len(call.id) == 9
    assert call.id.isalnum()
    first, second = read("json", f"[{LOOK}, {LOOK}]").calls
    assert first.id != second.id


def test_tool_format_follows_the_model_type() -> None:
    assert set(MODEL_FORMATS.values()) <= set(FORMATS)
    assert tool_format_name("auto", ["qwen3"], set()) == "hermes"
    assert tool_format_name("auto", ["unheard-of"], set()) == "json"
    assert tool_format_name("auto", [], set()) == "json"
    assert tool_format_name("auto", ["mistral3", "ministral3"], set()) == "mistral"
    assert tool_format_name("mistral", ["qwen3"], set()) == "mistral"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_format_of_the_template_takes_precedence_over_the_model_type(model_type: str) -> None:
    for written in ("qwen3_coder", "hermes"):
        assert tool_format_name("auto", [model_type], {"<tool_call>"}, written) == written


@pytest.mark.parametrize(
    ("name", "tags", "written", "expected"),
    [
        ("auto", set(), "mistral_v13", "mistral_v13"),
        ("auto", {"[ARGS]", "[CALL_ID]"}, "mistral_v13", "mistral_v13"),
        ("auto", {"[ARGS]", "[CALL_ID]"}, "mistral", "mistral"),
        ("auto", {"[ARGS]", "[CALL_ID]"}, None, "mistral_v11"),
        ("auto", {"[ARGS]"}, None, "mistral_v13"),
        ("auto", {"[ARGS]"}, "hermes", "hermes"),
        ("auto", {"<tool_call>"}, "qwen3_coder", "qwen3_coder"),
        ("hermes", {"<tool_call>"}, "qwen3_coder", "hermes"),
        ("qwen3_coder", set(), "hermes", "qwen3_coder"),
        ("mistral", {"[ARGS]"}, "mistral", "mistral"),
        ("mistral", set(), "mistral_v11", "mistral_v11"),
        ("mistral", {"[ARGS]"}, "hermes", "mistral_v13"),
        ("mistral", set(), "hermes", "mistral"),
        ("hermes", {"[ARGS]"}, "mistral_v11", "hermes"),
    ],
)
def test_variant_of_mistral_follows_template_and_vocabulary(
    name: str, tags: set[str], written: str | None, expected: str
) -> None:
    assert tool_format_name(name, ["mistral3", "mistral"], tags, written) == expected


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_endless_blanks_are_not_held_back(form: str) -> None:
    for text in (
        " " * 9999,
        f"<tool_call>{LOOK}" + "\n" * 9999,
        f"[TOOL_CALLS][{LOOK}" + "\n" * 9999,
        LOOK + " " * 9999,
    ):
        parser = ToolParser(FORMATS[form], NAMES)
        for character in text:
            parser.push(character)
        assert len(parser._held) <= MAX_BLANKS + len("</tool_call>")
        whole = read(form, text)
        chunked = read(form, *text)
        assert (chunked.content, calls(chunked)) == (whole.content, calls(whole))


FRAGMENTS = [
    " " * 40,
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[", "]", "{", "}", ",", ";", " ", "\n", '"', "\\",
    '"name": "look"', '"name":"add"', '"arguments": {', '"parameters": {}', '"arguments": "{}"', '"a": 1', ":", "text",
    "null", LOOK, ADD, f"<tool_call>\n{LOOK}\n</tool_call>", f"[TOOL_CALLS][{LOOK}]",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(st.sampled_from(sorted(FORMATS)), chunkings(), st.booleans())
def test_parsing_does_not_depend_on_the_chunks(form: str, cut: tuple[str, list[str]], parallel: bool) -> None:
    text, chunks = cut
    whole = read(form, text, parallel=parallel)
    for other in (read(form, *chunks, parallel=parallel), read(form, *text, parallel=parallel)):
        assert (other.content, calls(other)) == (whole.content, calls(whole))


@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=40))
def test_text_without_a_call_is_kept(form: str, text: str) -> None:
    message = read(form, text)
    assert message.calls or message.content == text
