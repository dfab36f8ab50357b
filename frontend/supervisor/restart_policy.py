"""Decide whether and when to restart a child process that has exited."""

from typing import Literal

from msgspec import Struct

from tandem.frontend.process import FIRST_BACKOFF, LAST_BACKOFF, STEADY_SECONDS, describe_exit
from tandem.protocol.errors import ExitCode

MAX_FAILED_STARTS = 3
"""Consecutive exits with the same status before the program was ready, after which it is not restarted."""


class Exit(Struct, frozen=True):
    """Exit of a child process."""

    code: int
    """Exit code, negative for a signal."""
    was_ready: bool
    """True if the process had been ready."""
    uptime: float
    """Seconds from its start to its end."""
    failure: str = ""
    """Failure reported by the process, if any."""


class Verdict(Struct, frozen=True):
    """Decision after an exit: a restart after a pause, or the end of the service."""

    restart_after: float | None
    """Seconds until the restart; None to end the service."""
    exit_code: ExitCode
    """Exit code of the service if it ends; otherwise OK."""
    level: Literal["debug", "error"]
    """Level of the line to log."""
    line: str


class RestartPolicy:
    """Restart policy of a child: always once it was ready, otherwise a few times.

    A child that was ready once has valid settings, so it is restarted after any exit, with exponential backoff. Before
    that, exit code CONFIG or `MAX_FAILED_STARTS` equal failures in a row end the service.
    """

    def __init__(self, first_backoff: float = FIRST_BACKOFF, last_backoff: float = LAST_BACKOFF) -> None:
        self.was_ever_ready = False
        self._first_backoff = first_backoff
        self._last_backoff = last_backoff
        self._backoff = first_backoff
        self._exits = 0
        self._failed_starts: list[int] = []

    def mark_ready(self) -> None:
        """Record that the child, or one with the same settings, is ready."""
        self.was_ever_ready = True

    def after(self, ended: Exit, name: str) -> Verdict:
        """Return the decision after an exit of the child called `name` in log lines."""
        self._exits += 1
        status = describe_exit(ended.code)
        if not self.was_ever_ready:
            if ended.code == ExitCode.CONFIG:
                # At the first start the child has just logged the reason.
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
