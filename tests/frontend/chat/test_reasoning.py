"""Thoughts told apart from answers, however the text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.deltas import MessageDelta, Reasoning
from tandem.frontend.chat.message import whole_message
from tandem.frontend.chat.reasoning import ReasoningParser, opens_thoughts


def read(opened: bool, *chunks: str) -> tuple[str | None, str | None]:
    """Thoughts and answer."""
    parser = ReasoningParser(opened)
    deltas: list[MessageDelta] = [delta for chunk in chunks for delta in parser.push(chunk)]
    deltas += parser.finish()
    message = whole_message(deltas)
    return message.reasoning, message.content


@pytest.mark.parametrize(
    ("opened", "text", "thoughts", "answer"),
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
def test_thoughts_and_answer(opened: bool, text: str, thoughts: str | None, answer: str | None) -> None:
    assert read(opened, text) == (thoughts, answer)


def test_thoughts_stream_as_they_come() -> None:
    parser = ReasoningParser(opened=False)
    assert parser.push("<think>\nLet me") == [Reasoning("Let me")]
    assert parser.thought
    assert parser.push(" see <") == [Reasoning(" see")]
    assert parser.push("b>") == [Reasoning(" <b>")]
    answering = ReasoningParser(opened=False)
    answering.push("no thoughts")
    assert not answering.thought


def test_a_prompt_may_open_thoughts() -> None:
    assert opens_thoughts("<|im_start|>assistant\n<think>\n")
    assert not opens_thoughts("<think>\n\n</think>\n\n")
    assert not opens_thoughts("<|im_start|>assistant\n")


FRAGMENTS = [" " * 40, "<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "a", "word"]


@given(st.booleans(), st.lists(st.sampled_from(FRAGMENTS), max_size=10))
def test_the_result_does_not_depend_on_the_chunks(opened: bool, chunks: list[str]) -> None:
    text = "".join(chunks)
    assert read(opened, *chunks) == read(opened, text) == read(opened, *text)
