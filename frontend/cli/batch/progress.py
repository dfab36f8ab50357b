"""Counts of a batch, and their display on the terminal."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.cli.batch.files import BatchResult
from tandem.frontend.progress import Progress


class _Usage(Struct):
    """Token counts under the names of both of OpenAI's APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(Struct):
    usage: _Usage


def _usage(body: Raw) -> _Usage:
    """Read the usage of a response, or zeros if the server does not report it."""
    try:
        return msgspec.json.decode(body, type=_Body).usage
    except msgspec.ValidationError:
        return _Usage()


class Tally:
    """Count the results and tokens of one run."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failures: Counter[str] = Counter()
        """Number of failures by status, or by error code if there was no response."""
        self.tokens_in = 0
        self.tokens_out = 0

    def count(self, outcome: BatchResult) -> None:
        """Add one result."""
        response = outcome.response
        if response is None:
            assert outcome.error is not None
            self.failures[outcome.error.code] += 1
        elif response.status_code != 200:
            self.failures[str(response.status_code)] += 1
        else:
            self.succeeded += 1
            usage = _usage(response.body)
            self.tokens_in += usage.prompt_tokens + usage.input_tokens
            self.tokens_out += usage.completion_tokens + usage.output_tokens

    def line(self, seconds: float) -> str:
        """Format the counts of a run of this duration as one line."""
        failed = ", ".join(f"{count} with {name}" for name, count in sorted(self.failures.items()))
        return (
            f"this run: {self.succeeded} succeeded, {self.failures.total()} failed{f' ({failed})' if failed else ''}; "
            f"{self.tokens_in} tokens in, {self.tokens_out} out, {seconds:.1f} s, "
            f"{self.tokens_out / max(seconds, 1e-9):.1f} tokens/s"
        )


REPORT_SECONDS = 60.0
"""Minimum seconds between two lines that report the same wait."""


class BatchProgress:
    """Progress bar of a run, or the reason why it waits.

    On a terminal the line is redrawn continuously; elsewhere a wait is logged at most once a minute.
    """

    def __init__(self, total: int, tally: Tally, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar = Progress("batch", total, None)
        self._tally = tally
        self._clock = clock
        self._started = clock()
        self._waiting_for = ""
        self._waiting_since = 0.0
        self._reported: dict[str, float] = {}
        """Time of the last line for each reason."""

    def wait(self, reason: str) -> None:
        """Show the reason of a wait, until `proceed`."""
        if self._waiting_for:
            return
        self._waiting_for, self._waiting_since = reason, self._clock()
        if sys.stderr.isatty():
            self.draw()
        elif self._waiting_since - self._reported.get(reason, -REPORT_SECONDS) >= REPORT_SECONDS:
            self._reported[reason] = self._waiting_since
            print(f"tandem: {reason}", file=sys.stderr)

    def proceed(self) -> None:
        """Show the progress bar again, after a response."""
        self._waiting_for = ""
        self.draw()

    def draw(self) -> None:
        """Redraw the line."""
        now, tally = self._clock(), self._tally
        if self._waiting_for:
            self._bar.show(f"{self._waiting_for}, {now - self._waiting_since:.0f} s")
        else:
            done = tally.succeeded + tally.failures.total()
            self._bar.draw(done, now - self._started, tally.tokens_out)

    async def keep_drawing(self) -> None:
        """Redraw the line periodically, until cancelled."""
        try:
            while True:
                self.draw()
                await asyncio.sleep(self._bar.interval)
        finally:
            self._bar.clear()
