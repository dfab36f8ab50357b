"""Progress bar on stderr, drawn only if that is a terminal."""

import sys
from typing import TextIO

WIDTH = 30


class Progress:
    """Progress bar of requests or of time.

    It covers a number of requests, or a duration in seconds if their number is unknown.
    """

    def __init__(self, label: str, total: int | None, duration: float | None, out: TextIO | None = None) -> None:
        self.label = label
        self.interval = 0.25
        self._total, self._duration = total, duration
        self._out = out or sys.stderr
        self._shown = self._out.isatty()

    def line(self, done: int, seconds: float) -> str:
        """Format the bar for `done` requests after `seconds` seconds."""
        share = done / self._total if self._total else seconds / (self._duration or seconds or 1.0)
        share = min(1.0, max(0.0, share))
        filled = round(WIDTH * share)
        total = f"/{self._total}" if self._total else ""
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{self.label:>14} [{bar}] {100 * share:3.0f} %  {done}{total} requests  {max(0.0, seconds):.1f} s"

    def draw(self, done: int, seconds: float) -> None:
        """Replace the bar on the terminal."""
        if self._shown:
            self._out.write("\r" + self.line(done, seconds))
            self._out.flush()

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self._shown:
            self._out.write("\r" + " " * 100 + "\r")
            self._out.flush()
