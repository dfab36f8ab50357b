"""Progress bar on stderr, drawn only if that is a terminal."""

import sys
from typing import TextIO

WIDTH = 30


class Progress:
    """Progress bar of requests or of time.

    It counts requests, or seconds if their number is unknown. Other progress is drawn by `bar`.
    """

    def __init__(
        self, label: str, total: int | None = None, duration: float | None = None, out: TextIO | None = None
    ) -> None:
        self._label = label
        self.interval = 0.25
        self._total, self._duration = total, duration
        self._out = out or sys.stderr
        self.is_shown = self._out.isatty()
        """True if the bar is drawn."""
        self._width = 0

    def line(self, done: int, seconds: float, tokens: int | None = None) -> str:
        """Format the bar for `done` requests after `seconds` seconds.

        tokens: number of tokens generated so far, to add their rate and the remaining time.
        """
        share = done / self._total if self._total else seconds / (self._duration or seconds or 1.0)
        share = min(1.0, max(0.0, share))
        total = f"/{self._total}" if self._total else ""
        rate = "" if tokens is None else f"  {tokens / max(seconds, 1e-9):.0f} tokens/s"
        if rate and 0 < share < 1:
            rate += f"  {seconds * (1 - share) / share:.0f} s left"
        text = f"{100 * share:3.0f} %  {done}{total} requests  {max(0.0, seconds):.1f} s{rate}"
        return self.bar(round(WIDTH * share), text)

    def bar(self, filled: int, text: str) -> str:
        """Format a label, a bar with `filled` of WIDTH cells, and a text."""
        return f"{self._label:>14} [{'#' * filled}{'.' * (WIDTH - filled)}] {text}"

    def draw(self, done: int, seconds: float, tokens: int | None = None) -> None:
        """Replace the bar on the terminal."""
        self.show(self.line(done, seconds, tokens))

    def show(self, line: str) -> None:
        """Replace the bar by another line of text."""
        if self.is_shown:
            # Overwrite the rest of a longer line; leave the cursor where a log line may start.
            self._out.write("\r" + line.ljust(self._width) + "\r")
            self._out.flush()
            self._width = max(self._width, len(line))

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self.is_shown:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
