"""Parsing the text of a choice into reasoning, content and tool calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.message import Content, MessageDelta, Reasoning, join_deltas
from tandem.frontend.chat.message_parser import MessageShape, prompt_opens_thinking
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.output_tags import OutputTags, Tag
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


def test_a_call_within_reasoning_is_not_a_call() -> None:
    parser = MessageShape(USE, FORMATS["hermes"], OutputTags(thinking=ThinkingMode.OPEN)).new_parser()
    deltas = parser.push(piece(f"maybe {CALL}", "length"))
    assert deltas == [Reasoning(f"maybe {CALL}")]
    assert parser.num_calls == 0


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
