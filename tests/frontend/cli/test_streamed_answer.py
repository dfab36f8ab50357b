"""Streamed answers: what is printed of them, and their figures by a clock of the test's."""

import io
import re
from collections.abc import Generator
from typing import Any

import pytest

from tandem.frontend.cli.streamed_answer import StreamedAnswer
from tests.fakes.clock import FakeClock


def event(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": None} | fields]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}


@pytest.mark.parametrize(
    ("pieces", "rate"),
    [((0.0,), ""), ((0.0, 2.0), ", 4.0 tokens/s"), ((0.0, 0.5, 1.1), ", 5.0 tokens/s")],
    ids=["all at once", "two pieces", "three pieces"],
)
def test_the_rate_is_that_of_the_tokens_after_the_first_piece(pieces: tuple[float, ...], rate: str) -> None:
    """There is none for an answer that comes in one piece."""
    clock = FakeClock()
    answer = StreamedAnswer(io.StringIO(), clock)
    clock.advance(0.25)
    for seconds in pieces:
        clock.advance(seconds)
        answer.push(event("word "))
    clock.advance(7.0)
    answer.push(event("", finish_reason="stop"))
    answer.push(USAGE)
    assert re.fullmatch(rf"3 [^,]*, 9 [^,]*, [^,]*\b0\.25 s{rate}, .*\bstop", answer.summary())


def test_an_answer_without_text_or_end_has_no_times() -> None:
    answer = StreamedAnswer(io.StringIO(), FakeClock())
    assert re.fullmatch(r"0 [^,]*, 0 [^,]*, stopped", answer.summary())


def test_reasoning_is_dim_on_a_terminal_and_omitted_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def events() -> Generator[dict[str, Any], None, None]:
        for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "which"}, {"content": "this"}):
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    file, terminal = io.StringIO(), Terminal()
    for out in (file, terminal):
        answer = StreamedAnswer(out, lambda: 0.0)
        assert answer.follow(events())
        assert answer.content == "this"
    assert file.getvalue() == "this\n"
    assert terminal.getvalue() == "\x1b[2mwhich\x1b[0m\nthis\n"
