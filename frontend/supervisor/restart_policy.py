"""Decision on whether, and when, a child that has ended is started again."""

from typing import Literal

from msgspec import Struct

from tandem.frontend.process import FIRST_BACKOFF, LAST_BACKOFF, STEADY_SECONDS, describe_exit
from tandem.protocol.errors import ExitCode

MAX_FAILED_STARTS = 3
"""Exits in a row with one exit status, each before the program was ready, after which it is not started again."""


class Exit(Struct, frozen=True):
    """End of a child process."""

    code: int
    """Exit code, negative for a signal."""
    was_ready: bool
    """True if the process had been ready."""
    uptime: float
    """Seconds from its start to its end."""
    failure: str = ""
    """What the process said of its failure, if it did."""


class Verdict(Struct, frozen=True):
    """Consequence of an exit: a restart after a pause, or the end of the service."""

    restart_after: float | None
    """Seconds until the restart; None if the child is given up."""
    exit_code: ExitCode
    """Exit code of the service if the child is given up; OK otherwise."""
    level: Literal["debug", "error"]
    """Level of the line to log."""
    line: str


class RestartPolicy:
    """Restart rule of one child: always once it has been ready, else a few times.

    A child that was ready once has settings that work: it is started again whatever it says later, with pauses that
    grow. Before that, exit code CONFIG and `MAX_FAILED_STARTS` equal failures in a row end the service.
    """

    def __init__(self, first_backoff: float = FIRST_BACKOFF, last_backoff: float = LAST_BACKOFF) -> None:
        self.was_ever_ready = False
        self._first_backoff = first_backoff
        self._last_backoff = last_backoff
        self._backoff = first_backoff
        self._exits = 0
        self._failed_starts: list[int] = []

    def mark_ready(self) -> None:
        """Note that the child is ready, or one with the same settings."""
        self.was_ever_ready = True

    def after(self, ended: Exit, name: str) -> Verdict:
        """Return what follows an exit of the child that log lines call `name`."""
        self._exits += 1
        status = describe_exit(ended.code)
        if not self.was_ever_ready:
            if ended.code == ExitCode.CONFIG:
                # At the first start its own message is the last one, and says it all.
                line = f"{name} cannot run with these settings; see its message above"
                return Verdict(None, ExitCode.CONFIG, "debug" if self._exits == 1 else "error", line)
            self._failed_starts = [*(code for code in self._failed_starts if code == ended.code), ended.code]
            if len(self._failed_starts) == MAX_FAILED_STARTS:
                reason = f": {ended.failure}" if ended.failure else ""
                line = f"{name} failed to start {MAX_FAILED_STARTS} times in a row with {status}{reason}; see its"
                return Verdict(None, ExitCode.FATAL, "error", f"{line} messages above")
        if ended.was_ready and ended.uptime > STEADY_SECONDS:
            self._backoff = self._first_backoff
        pause, self._backoff = self._backoff, min(2 * self._backoff, self._last_backoff)
        line = f"{name} ended with {status}; restarting it in {pause:.1f} s"
        if ended.code == ExitCode.CONFIG:
            line = (
                f"{name} cannot start with its settings ({status}, see its message above), with which it was ready "
                f"before; trying again in {pause:.1f} s"
            )
        return Verdict(pause, ExitCode.OK, "error", line)
