"""How far a piece of work has come, on a terminal's stderr; silent where stderr is none."""

import sys
from typing import TextIO

WIDTH = 30


class Progress:
    """A bar of requests done."""

    def __init__(self, label: str, total: int | None, duration: float | None, out: TextIO | None = None) -> None:
        self.label = label
        self.interval = 0.25
        self._total, self._duration = total, duration
        self._out = out or sys.stderr
        self._shown = self._out.isatty()

    def line(self, done: int, seconds: float) -> str:
        """The share is of requests where their number is known, else of the time."""
        share = done / self._total if self._total else seconds / (self._duration or seconds or 1.0)
        share = min(1.0, max(0.0, share))
        filled = round(WIDTH * share)
        total = f"/{self._total}" if self._total else ""
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{self.label:>14} [{bar}] {100 * share:3.0f} %  {done}{total} requests  {max(0.0, seconds):.1f} s"

    def draw(self, done: int, seconds: float) -> None:
        if self._shown:
            self._out.write("\r" + self.line(done, seconds))
            self._out.flush()

    def clear(self) -> None:
        if self._shown:
            self._out.write("\r" + " " * 100 + "\r")
            self._out.flush()
