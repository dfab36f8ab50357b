"""Pause of an engine, asked for by its operators."""

from tandem.protocol.commands import Pause, PauseMode
from tandem.protocol.events import Answer


class PauseSwitch:
    """State of the pause, and the calls that wait for it.

    The engine is pausing from the command on. It is paused once no step is in flight and, in mode `wait`, the requests
    that have begun have ended.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        """Mode of the pause; None while the engine is neither pausing nor paused."""
        self.refuses_new = False
        """True if requests that arrive are refused until the engine resumes."""
        self.clear_cache = True
        """True if rows that are kept are computed again under other weights."""
        self._calls: list[tuple[bytes, int]] = []
        """Frontends and numbers of the calls that wait for the pause."""
        self._resumes: list[tuple[bytes, int]] = []
        """The same of calls that have ended one."""

    @property
    def holds_rows(self) -> bool:
        """True if no step may be launched."""
        return self.mode is not None and self.mode != "wait"

    @property
    def needs_report(self) -> bool:
        """True if the engine pauses or has paused, or if calls wait for an answer."""
        return self.mode is not None or bool(self._calls or self._resumes)

    def begin(self, client: bytes, command: Pause) -> None:
        """Begin a pause, or change the one in force.

        The call is answered once the engine is paused.
        """
        self.mode, self.refuses_new, self.clear_cache = command.mode, command.refuse_new, command.clear_cache
        self._calls.append((client, command.call))

    def end(self, client: bytes, call: int) -> None:
        """End the pause, if there is one; the call is answered in any case."""
        self.mode, self.refuses_new, self.clear_cache = None, False, True
        self._resumes.append((client, call))

    def is_complete(self, in_flight: int, num_begun: int) -> bool:
        """Return whether the engine is paused.

        in_flight: number of steps; num_begun: number of sequences of requests that have begun.
        """
        return self.mode is not None and not in_flight and (self.holds_rows or not num_begun)

    def take_answers(self, complete: bool) -> list[tuple[bytes, Answer]]:
        """Return the answers to calls that can be given now, each once.

        Each comes with its frontend. complete: True if the engine is paused.
        """
        resumes, self._resumes = self._resumes, []
        answers = [(client, Answer(call, True)) for client, call in resumes]
        if self.mode is not None and not complete:
            return answers
        calls, self._calls = self._calls, []
        message = "" if complete else "the engine was resumed before it had paused"
        return answers + [(client, Answer(call, complete, message)) for client, call in calls]

    def forget(self, client: bytes) -> None:
        """Drop the calls of a frontend that is gone."""
        self._calls = [call for call in self._calls if call[0] != client]
        self._resumes = [call for call in self._resumes if call[0] != client]
