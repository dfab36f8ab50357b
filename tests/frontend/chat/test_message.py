"""Complete messages, and the length of text held back."""

import pytest

from tandem.frontend.chat.message import (
    MAX_BLANKS,
    CallArguments,
    CallStart,
    Content,
    Message,
    MessageDelta,
    ToolCall,
    count_blanks_before,
    holdback_length,
    join_deltas,
)


def test_join_deltas_builds_the_complete_message() -> None:
    deltas: list[MessageDelta] = [
        CallStart(0, "x", "a"), CallArguments(0, "{"), CallArguments(0, "}"), CallStart(1, "y", "b"),
        CallArguments(1, "{}"),
    ]  # fmt: skip
    assert join_deltas(deltas) == Message(None, None, [ToolCall("x", "a", "{}"), ToolCall("y", "b", "{}")])
    assert join_deltas([]) == Message("", None, [])
    assert join_deltas([Content("a"), Content("b")]) == Message("ab", None, [])


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("", ""), ("word", ""), ("word ", " "), ("word \n<", " \n<"), ("word<en", "<en"), ("a <x", ""), ("<", "<"),
        (" \t ", " \t "), ("a" + " " * 100, " " * MAX_BLANKS), ("a" + " " * 100 + "<e", " " * MAX_BLANKS + "<e"),
    ],
)  # fmt: skip
def test_holdback_covers_a_partial_marker_and_the_blanks_before_it(text: str, held: str) -> None:
    assert text[len(text) - holdback_length(text, "<end>") :] == held


def test_blanks_before_an_offset_are_counted_up_to_the_limit() -> None:
    assert count_blanks_before("a  b", 3) == 2
    assert count_blanks_before("a  b", 4) == 0
    assert count_blanks_before("  ", 0) == 0
    assert count_blanks_before(" " * 100, 100) == MAX_BLANKS
