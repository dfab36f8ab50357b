"""What of a text's end has to wait."""

import pytest

from tandem.frontend.chat.held_text import MAX_BLANKS, blanks_before, held_length


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("", ""), ("word", ""), ("word ", " "), ("word \n<", " \n<"), ("word<en", "<en"), ("a <x", ""), ("<", "<"),
        (" \t ", " \t "), ("a" + " " * 100, " " * MAX_BLANKS), ("a" + " " * 100 + "<e", " " * MAX_BLANKS + "<e"),
    ],
)  # fmt: skip
def test_held_length(text: str, held: str) -> None:
    assert text[len(text) - held_length(text, "<end>") :] == held


def test_blanks_before() -> None:
    assert blanks_before("a  b", 3) == 2
    assert blanks_before("a  b", 4) == 0
    assert blanks_before("  ", 0) == 0
    assert blanks_before(" " * 100, 100) == MAX_BLANKS
