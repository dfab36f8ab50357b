"""Progress bar of a load, a batch and offline inference."""

import io

from tandem.frontend.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_requests_or_time() -> None:
    assert "50 %  4/8 requests" in Progress("x", 8, None).line(4, 1.0)
    assert "25 %  4 requests" in Progress("x", None, 8.0).line(4, 2.0)


def test_progress_is_drawn_only_on_a_terminal() -> None:
    file, terminal = io.StringIO(), Terminal()
    for out in (file, terminal):
        progress = Progress("x", 8, None, out)
        progress.draw(4, 1.0)
        progress.clear()
    assert file.getvalue() == ""
    assert terminal.getvalue().startswith("\r             x [###############...............]  50 %")
    assert terminal.getvalue().endswith(" \r")
