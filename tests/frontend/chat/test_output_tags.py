"""Tags in outputs, as tokens of any kind or as text: what is reasoning, content and a call, in any chunks."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.grammar.grammar import MISTRAL_THINK_TAGS, THINK_TAGS, ThinkingMode, ThinkTags
from tandem.protocol.errors import FinishReason
from tests.support.tagged_output import Parsed, TaggedModel

KINDS = {"special": True, "added": False, "text": None}
"""Kinds of models by what their tags are."""
OPTIONAL, OPEN = ThinkingMode.OPTIONAL, ThinkingMode.OPEN
LOOK, ADD = ("look", '{"at": "the \\"moon\\" {"}'), ("add", '{"a": [1, {"b": 2}]}')


@cache
def model(kind: str) -> TaggedModel:
    return TaggedModel(KINDS[kind])


def as_json(call: tuple[str, str], key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


CALLS = {
    "hermes": "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in (LOOK, ADD)),
    "qwen3_coder": "\n".join(
        f"<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        for name, key, value in (("look", "at", 'the "moon" {'), ("add", "a", '[1, {"b": 2}]'))
    ),
    "llama3_json": "; ".join(as_json(call, "parameters") for call in (LOOK, ADD)),
    "mistral": f"[TOOL_CALLS][{as_json(LOOK)}, {as_json(ADD)}]",
    "mistral_v11": "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]{name:x<9}[ARGS]{arguments}" for name, arguments in (LOOK, ADD)
    ),
    "mistral_v13": "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in (LOOK, ADD)),
    "json": f"{as_json(LOOK)}\n{as_json(ADD)}",
}
THOUGHTS = {"think": THINK_TAGS, "mistral": MISTRAL_THINK_TAGS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_of_each_format_are_parsed_at_every_cut(kind: str, form: str, mode: str) -> None:
    known = model(kind)
    shape = known.shape(form, mode=mode)
    ids = known.ids(CALLS[form])
    whole = known.parse(shape, ids)
    assert (whole.message.content, whole.calls, whole.finish_reason) == (None, [LOOK, ADD], "tool_calls")
    if form == "mistral_v11":
        assert [call.id for call in whole.message.calls] == ["lookxxxxx", "addxxxxxx"]
    assert known.parse(shape, ids, [1] * len(ids)).calls == [LOOK, ADD]
    for cut in range(len(ids)):
        assert known.parse(shape, ids, [cut]).calls == [LOOK, ADD]
        ended = known.parse(shape, ids[:cut], reason=FinishReason.LENGTH)
        streamed = known.parse(shape, ids[:cut], [1] * cut, reason=FinishReason.LENGTH)
        assert (streamed.calls, streamed.message.content) == (ended.calls, ended.message.content)
        if ended.calls or mode == "required":
            # Neither what follows a whole call nor the call that was cut is content.
            assert not ended.message.content
        for (name, arguments), expected in zip(ended.calls, (LOOK, ADD), strict=False):
            assert (name, expected[1].startswith(arguments)) == (expected[0], True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tags", THOUGHTS.values(), ids=THOUGHTS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_reasoning_is_parsed_whatever_its_tags_are(kind: str, tags: ThinkTags, skip_special: bool) -> None:
    known = model(kind)
    text = f"{tags.start}\nwhat to do\n{tags.end}\n\nI look.\n{CALLS['hermes']}"
    shape = known.shape("hermes", OPTIONAL, tags, skip_special=skip_special)
    ids = known.ids(text)
    for cut in range(len(ids) + 1):
        parsed = known.parse(shape, ids, [cut])
        message = parsed.message
        assert (message.reasoning, message.content, parsed.calls) == ("what to do", "I look.", [LOOK, ADD])
        ended = known.parse(shape, ids[:cut], reason=FinishReason.LENGTH).message
        assert "what to do".startswith((ended.reasoning or "").partition("\n")[0])
        if kind != "text":
            assert not (ended.reasoning or "").endswith(tuple(tags.texts))
    if kind != "text":
        expected = len(known.ids(f"{tags.start}\nwhat to do\n{tags.end}"))
        assert known.parse(shape, ids).reasoning_tokens == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_other_special_tokens_are_dropped_unless_asked_for(kind: str, skip_special: bool) -> None:
    known = model(kind)
    for form, calls in CALLS.items():
        text = f"<think>a<|other|>b</think>c<|other|>d {calls}<|other|>"
        if form in ("llama3_json", "json"):
            text = f"<think>a<|other|>b</think>{calls}"
        parsed = known.parse(known.shape(form, OPTIONAL, skip_special=skip_special), text)
        other = "" if skip_special else "<|other|>"
        assert parsed.message.reasoning == f"a{other}b"
        assert parsed.calls == [LOOK, ADD]
        assert (parsed.message.content or "").replace(other, "") in ("cd", "")


def test_a_special_tag_that_is_not_parsed_is_dropped_like_other_special_tokens() -> None:
    known = model("special")
    cases = {
        "a</think>b": "ab",
        "<|python_tag|>search.call(1)": "search.call(1)",
    }
    for text, content in cases.items():
        for skip in (True, False):
            shape = known.shape("llama3_json", OPTIONAL, skip_special=skip)
            assert known.parse(shape, text).message.content == (content if skip else text)
    shape = known.shape("mistral_v13")
    assert known.parse(shape, "[TOOL_CALLS]other[ARGS]{}").message.content == "other{}"
    shape = known.shape("mistral_v13", skip_special=False)
    assert known.parse(shape, "[TOOL_CALLS]other[ARGS]{}").message.content == "[TOOL_CALLS]other[ARGS]{}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_python_tag_announces_a_call(kind: str, skip_special: bool) -> None:
    known = model(kind)
    shape = known.shape("llama3_json", skip_special=skip_special)
    call = as_json(LOOK, "parameters")
    for text, content in ((f"<|python_tag|>{call}", None), (f"I look.\n<|python_tag|>{call}", "I look."),
                          (f"\n<|python_tag|>{call}", None)):  # fmt: skip
        ids = known.ids(text)
        for sizes in ([], [1] * len(ids)):
            parsed = known.parse(shape, ids, sizes)
            assert (parsed.message.content or None, parsed.calls) == (content, [LOOK])


@pytest.mark.parametrize("kind", ["special", "added"])
@pytest.mark.parametrize("tags", THOUGHTS.values(), ids=THOUGHTS)
def test_a_tag_spelled_with_other_tokens_is_text(kind: str, tags: ThinkTags) -> None:
    known = model(kind)
    shape = known.shape("hermes", OPTIONAL, tags)
    text = f"{tags.start}it writes ¦{tags.end}¦ here{tags.end}and ¦<tool_call>¦ there"
    ids = known.ids(text)
    for cut in range(len(ids) + 1):
        parsed = known.parse(shape, ids, [cut])
        assert parsed.message.reasoning == f"it writes {tags.end} here"
        assert (parsed.message.content, parsed.calls) == ("and <tool_call> there", [])
        assert parsed.reasoning_tokens == ids.index(known.raw.token_to_id(tags.end)) + 1
    spelled = known.parse(shape, f"¦{tags.start}¦no thought{tags.end}")
    assert spelled.message.reasoning is None
    assert spelled.reasoning_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_tags_within_the_strings_of_a_call_are_text(kind: str) -> None:
    known = model(kind)
    arguments = '{"at": "<tool_call>a</tool_call></think>[TOOL_CALLS][ARGS]"}'
    for form, text in (
        ("hermes", f"<tool_call>\n{as_json(('look', arguments))}\n</tool_call>"),
        ("mistral_v13", f"[TOOL_CALLS]look[ARGS]{arguments}"),
        ("mistral", f"[TOOL_CALLS][{as_json(('look', arguments))}]"),
    ):
        shape = known.shape(form, OPTIONAL, skip_special=False)
        ids = known.ids(text)
        for sizes in ([], [1] * len(ids)):
            parsed = known.parse(shape, ids, sizes)
            assert (parsed.calls, parsed.message.content) == ([("look", arguments)], None)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_tag_behind_a_whole_call_is_no_content(kind: str) -> None:
    known = model(kind)
    call = f"<tool_call>\n{as_json(LOOK)}\n"
    for end in ("¦</tool_call¦", "¦<¦", "</tool_call>\n¦<tool_ca¦", "</tool_call>\n<tool_call>", "</tool_call>\n"):
        parsed = known.parse(known.shape("hermes"), call + end, reason=FinishReason.LENGTH)
        assert (parsed.message.content, parsed.calls, parsed.finish_reason) == (
            (None, [LOOK], "length") if kind == "text" or "<tool_ca¦" not in end else
            ("\n<tool_ca", [LOOK], "length")
        )  # fmt: skip
    answered = known.parse(known.shape("hermes"), f"{call}</tool_call>\nDone <")
    assert answered.message.content == "\nDone <"


STOPS = ["Question:"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opened", [False, True])
def test_stop_strings_match_from_the_answer_on(kind: str, opened: bool) -> None:
    known = model(kind)
    shape = known.shape(None, OPEN if opened else OPTIONAL)
    thought, answer = "a Question: here", "use a path"
    text = f"{'' if opened else '<think>'}{thought}</think>\n\n{answer} Question: there"
    ids = known.ids(text)
    for cut in range(len(ids) + 1):
        parsed = known.parse(shape, ids, [cut], ["Question:", "\n\n"])
        assert (parsed.message.reasoning, parsed.message.content) == (thought, f"{answer} ")
        assert parsed.num_tokens == len(known.ids(text.rpartition(" there")[0]))
        closed = known.parse(shape, ids, [cut], ["never", "</think>"])
        assert (closed.message.reasoning, closed.message.content) == (thought, None)
        assert closed.num_tokens == len(known.ids(text.partition("\n\n")[0]))
        across = known.parse(shape, ids, [cut], ["</think>\n\nuse"], include_stop=True)
        assert (across.message.reasoning, across.message.content) == (thought, "use")
    without = known.parse(known.shape(None, OPTIONAL), "\n a Question: here", [1] * 9, STOPS)
    assert (without.message.reasoning, without.message.content) == (None, "\n a ")
    assert known.parse(known.shape(None, OPTIONAL), "<thi", [1] * 9, STOPS).message.content == "<thi"
    unparsed = known.parse(known.shape(), text, [], STOPS)
    assert unparsed.text.endswith("a ")


def test_a_stop_string_within_a_tag_leaves_no_tag() -> None:
    known = model("special")
    parsed = known.parse(known.shape("hermes"), f"I look.{CALLS['hermes']}", [], ["call>"])
    assert (parsed.message.content, parsed.calls) == ("I look.<tool_", [])
    shown = known.parse(known.shape("hermes"), f"I look.{CALLS['hermes']}", [1] * 4, ["call>"], include_stop=True)
    assert shown.calls == []


FRAGMENTS = [
    " " * 40, "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "<|other|>", "¦<think>¦", "¦</think>¦", "¦</tool¦", "¦[TOOL_CALLS]¦", " ", "\n", "a",
    "stop", "look", "{", "}", "[", "]", ",", as_json(LOOK), "abcdefgh1", "ü", "¦ü¦", *CALLS.values(),
]  # fmt: skip


def shown(parsed: Parsed) -> tuple[object, ...]:
    message = parsed.message
    return message.content, message.reasoning, parsed.calls, parsed.finish_reason


@given(
    kind=st.sampled_from(sorted(KINDS)),
    form=st.sampled_from([None, *CALLS]),
    thinking=st.sampled_from(ThinkingMode),
    tags=st.sampled_from(list(THOUGHTS.values())),
    stop=st.sampled_from([[], ["stop"], ["a</thi", "p"], ["call>\n"], ["</think>"]]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    sizes=st.lists(st.integers(0, 9), max_size=12),
)
def test_parsing_does_not_depend_on_the_chunks(
    kind: str,
    form: str | None,
    thinking: ThinkingMode,
    tags: ThinkTags,
    stop: list[str],
    flags: tuple[bool, bool, bool],
    fragments: list[str],
    sizes: list[int],
) -> None:
    known = model(kind)
    skip_special, parallel, include_stop = flags
    ids = known.ids("".join(fragments))
    shape = known.shape(form, thinking, tags, skip_special=skip_special, parallel=parallel)
    whole = known.parse(shape, ids, [], stop, include_stop)
    for each in (sizes, [1] * len(ids)):
        assert shown(known.parse(shape, ids, each, stop, include_stop)) == shown(whole)


@pytest.mark.parametrize("special", [True, False])
def test_tags_of_a_sentence_piece_tokenizer_keep_the_spaces_around_them(special: bool) -> None:
    known = TaggedModel(special, sentence_piece=True)
    text = "<think>hello world</think>hello<|other|>world"
    parsed = known.parse(known.shape(None, OPTIONAL), text)
    assert (parsed.message.reasoning or "").strip() == "hello world"
    assert (parsed.message.content or "").strip() == "hello world"
