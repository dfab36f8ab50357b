"""Parsing the text of a choice into reasoning, content and tool calls."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.message import Content, MessageDelta, Reasoning, join_deltas
from tandem.frontend.chat.message_parser import MessageShape, prompt_opens_thinking
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.output_tags import OutputTags, Tag, TagToken
from tandem.frontend.grammar.grammar import ThinkingMode
from tests.support.tool_answers import SHAPE, THINK_END, TOKEN_SHAPE, USE

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


def piece(text: str, finish: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(0, text, [7] * len(text.split()), finish)


def test_output_without_tools_and_reasoning_is_all_content() -> None:
    shape = MessageShape()
    assert shape.is_content_only
    parser = shape.new_parser()
    assert parser.push(piece(CALL)) == [Content(CALL)]
    assert parser.push(piece("", "stop")) == []
    assert parser.finish_reason("stop") == "stop"


def test_reasoning_content_and_a_call_are_separated() -> None:
    shape = TOKEN_SHAPE
    assert not shape.is_content_only
    parser = shape.new_parser()
    deltas: list[MessageDelta] = []
    deltas += parser.push(ChoiceDelta(0, "<think>what to", [7, 7], None))
    deltas += parser.push(ChoiceDelta(0, " do</think>\n\nI look. ", [7, 8, 7, 7], None, tags=[Tag(3, THINK_END)]))
    deltas += parser.push(piece(CALL))
    deltas += parser.push(piece("", "stop"))
    message = join_deltas(deltas)
    assert (message.reasoning, message.content) == ("what to do", "I look.")
    assert [(call.name, call.arguments) for call in message.calls] == [("look", '{"at": 1}')]
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"
    assert parser.reasoning_tokens == 4


def test_reasoning_tokens_are_counted_when_one_token_ends_the_reasoning() -> None:
    unknown = SHAPE.new_parser()
    unknown.push(ChoiceDelta(0, "<think>a", [7], None))
    assert unknown.reasoning_tokens is None
    none = TOKEN_SHAPE.new_parser()
    none.push(ChoiceDelta(0, "an answer", [7, 7], "stop"))
    assert none.reasoning_tokens == 0
    endless = MessageShape(tags=OutputTags({8: THINK_END}, ThinkingMode.OPEN)).new_parser()
    endless.push(ChoiceDelta(0, "on and on", [7, 7, 7], "length"))
    assert endless.reasoning_tokens == 3


THINKING = MessageShape(USE, FORMATS["hermes"], OutputTags(thinking=ThinkingMode.OPEN))
TOKEN_THINKING = MessageShape(
    USE, FORMATS["hermes"], OutputTags({5: TagToken("<tool_call>"), 8: THINK_END}, ThinkingMode.OPEN)
)
"""Shape of a model with tokens for its tags."""


def message_of(
    shape: MessageShape, chunks: list[str], finish: str = "stop"
) -> tuple[str | None, str | None, list[str], str]:
    """Return reasoning, content, arguments of the calls, and the finish reason."""
    parser, deltas = shape.new_parser(), []
    for chunk in chunks:
        tags = [
            Tag(match.start(), token)
            for token in shape.tags.tokens.values()
            for match in re.finditer(re.escape(token.text), chunk)
        ]
        deltas += parser.push(ChoiceDelta(0, chunk, [7], None, tags=sorted(tags, key=lambda tag: tag.offset)))
    deltas += parser.push(piece("", finish))
    message = join_deltas(deltas)
    return message.reasoning, message.content, [call.arguments for call in message.calls], parser.finish_reason(finish)


OTHER = CALL.replace("1", "2")
UNKNOWN = CALL.replace("look", "other")
ARGUMENTS, OTHER_ARGUMENTS = '{"at": 1}', '{"at": 2}'


@pytest.mark.parametrize("shape", [THINKING, TOKEN_THINKING])
@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        # Without an answer after them they are meant to be called.
        (f"maybe {CALL}", "stop", ("maybe", None, [ARGUMENTS], "tool_calls")),
        (f"maybe {CALL}\n{OTHER}\n", "stop", ("maybe", None, [ARGUMENTS, OTHER_ARGUMENTS], "tool_calls")),
        (f"maybe\n{CALL}\n</think>\n\n", "stop", ("maybe", None, [ARGUMENTS], "tool_calls")),
        (f"not {CALL} but {OTHER}", "stop", (f"not {CALL} but", None, [OTHER_ARGUMENTS], "tool_calls")),
        (f"not {UNKNOWN}{OTHER}", "stop", (f"not {UNKNOWN}", None, [OTHER_ARGUMENTS], "tool_calls")),
        (CALL, "stop", (None, None, [ARGUMENTS], "tool_calls")),
        # Otherwise they are thoughts.
        (f"maybe {CALL}", "length", (f"maybe {CALL}", None, [], "length")),
        (f"maybe {CALL}?", "stop", (f"maybe {CALL}?", None, [], "stop")),
        (f"maybe {UNKNOWN}", "stop", (f"maybe {UNKNOWN}", None, [], "stop")),
        (f"maybe {CALL[:-15]}", "stop", (f"maybe {CALL[:-15]}", None, [], "stop")),
        (f"maybe {CALL}</think>No.", "stop", (f"maybe {CALL}", "No.", [], "stop")),
        (f"maybe {CALL}</think>{OTHER}", "stop", (f"maybe {CALL}", None, [OTHER_ARGUMENTS], "tool_calls")),
        ("a <tool_call> b <tool_", "stop", ("a <tool_call> b <tool_", None, [], "stop")),
    ],
)
def test_calls_at_the_end_of_reasoning_are_calls_if_nothing_follows(
    text: str, finish: str, expected: tuple[str | None, str | None, list[str], str], shape: MessageShape
) -> None:
    if shape is THINKING:
        for size in (1, 2, 7, 1000):
            assert message_of(shape, [text[at : at + size] for at in range(0, len(text), size)], finish) == expected
    pieces = re.split("(<tool_call>|</think>)", text)
    assert message_of(shape, pieces, finish) == message_of(shape, [text], finish) == expected


def test_text_held_back_is_released_at_the_end() -> None:
    parser = MessageShape(USE, FORMATS["hermes"]).new_parser()
    assert parser.push(piece("half <tool_")) == [Content("half")]
    assert parser.push(piece("", "length")) == [Content(" <tool_")]


def read(opened: bool, *chunks: str) -> tuple[str | None, str | None]:
    """Parse the chunks into reasoning and answer."""
    parser = MessageShape(tags=OutputTags(thinking=ThinkingMode.OPEN if opened else ThinkingMode.OPTIONAL)).new_parser()
    deltas: list[MessageDelta] = [delta for chunk in chunks for delta in parser.push(ChoiceDelta(0, chunk, [7], None))]
    deltas += parser.push(ChoiceDelta(0, "", [], "stop"))
    message = join_deltas(deltas)
    return message.reasoning, message.content


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "answer"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (False, "\n<think>Hm.</think>Yes. ", "Hm.", "Yes. "),
        (True, "\nHm. <b>\n</think>\n\nYes.", "Hm. <b>", "Yes."),
        (False, "No thoughts. <think>Hm.</think>", None, "No thoughts. <think>Hm.</think>"),
        (False, "<think>\n\n</think>\n\nYes.", None, "Yes."),
        (False, "<think>Hm, and it never ends </thi", "Hm, and it never ends </thi", None),
        (True, "Hm. ", "Hm.", None),
        (False, "<thi", None, "<thi"),
        (False, "", None, ""),
        (True, "</think>", None, ""),
        (False, "<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    opened: bool, text: str, reasoning: str | None, answer: str | None
) -> None:
    assert read(opened, text) == (reasoning, answer)


def test_reasoning_streams_as_it_arrives() -> None:
    parser = SHAPE.new_parser()
    assert parser.push(piece("<think>\nLet me")) == [Reasoning("Let me")]
    assert parser.push(piece(" see <")) == [Reasoning(" see")]
    assert parser.push(piece("b>")) == [Reasoning(" <b>")]


def test_prompt_opens_thinking_only_at_its_end() -> None:
    assert prompt_opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not prompt_opens_thinking("<think>\n\n</think>\n\n")
    assert not prompt_opens_thinking("<|im_start|>assistant\n")


FRAGMENTS = [" " * 40, "<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "a", "word"]


@given(st.booleans(), st.lists(st.sampled_from(FRAGMENTS), max_size=10))
def test_reasoning_does_not_depend_on_the_chunks(opened: bool, chunks: list[str]) -> None:
    text = "".join(chunks)
    assert read(opened, *chunks) == read(opened, text) == read(opened, *text)
