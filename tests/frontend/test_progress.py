"""Progress bar of a load, a batch and offline inference."""

import io

from tandem.frontend.progress import Progress
from tests.support.refusals import numbers_in


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_requests_or_time() -> None:
    assert "50 %  4/8 requests" in Progress("x", 8, None).line(4, 1.0)
    assert "25 %  4 requests" in Progress("x", None, 8.0).line(4, 2.0)


def test_progress_with_tokens_shows_their_rate_and_the_time_left() -> None:
    line = Progress("chat", 8, None).line(2, 4.0, 100)
    assert "2/8 requests" in line and numbers_in(line.partition("requests")[2]) == [4, 25, 12]
    assert Progress("chat", 8, None).line(8, 4.0, 100).endswith("8/8 requests  4.0 s  25 tokens/s")
    assert Progress("chat", 8, None).line(0, 0.0, 0).endswith("0 tokens/s")


def test_a_shorter_line_covers_a_longer_one() -> None:
    terminal = Terminal()
    progress = Progress("x", 8, None, terminal)
    progress.draw(4, 1.0, 100)
    progress.show("waiting")
    bar, line = filter(None, terminal.getvalue().split("\r"))
    assert line == "waiting".ljust(len(bar))


def test_progress_is_drawn_only_on_a_terminal() -> None:
    file, terminal = io.StringIO(), Terminal()
    for out in (file, terminal):
        progress = Progress("x", 8, None, out)
        progress.draw(4, 1.0)
        progress.clear()
    assert file.getvalue() == ""
    assert terminal.getvalue().startswith("\r             x [###############...............]  50 %")
    assert terminal.getvalue().endswith(" \r")
