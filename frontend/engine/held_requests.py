"""Requests that wait for the engine to return."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct

from tandem.frontend.errors import ApiError

logger = logging.getLogger(__name__)

SAME_LINK_SECONDS = 2.0
"""Seconds after which a request is submitted again on the link that it was lost on, if that is ready after all."""


class HeldRequest(Protocol):
    """Request that lost its engine before any output was sent."""

    @property
    def had_run(self) -> bool:
        """True if an engine had started to compute it."""

    @property
    def arrived(self) -> float:
        """Arrival time in seconds."""

    def note_launched(self, request_ids: frozenset[int]) -> bool:
        """Record which sequences a lost engine had started to compute.

        Return False if the request ends because of that.
        """

    def resubmit(self) -> None:
        """Submit all its sequences again. Raises ApiError while the engine is not ready."""

    def give_up(self, error: ApiError) -> None:
        """Fail the request with this error."""


class _Hold(Struct):
    request: HeldRequest
    link: int
    added_at: float
    since: float
    """Start of its wait."""


class HeldRequests:
    """Table of requests that wait for the engine.

    Each waits for at most `timeout` seconds.

    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._holds: dict[int, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, request: HeldRequest, link: int, now: float, since: float) -> None:
        """Hold a request that was lost or refused on this link.

        since: start of its wait.
        """
        self._holds[id(request)] = _Hold(request, link, now, since)

    def discard(self, request: HeldRequest) -> None:
        """Remove a request, if it is held."""
        self._holds.pop(id(request), None)

    def resubmit(self, link: int, now: float) -> int:
        """Submit requests again on this link; return their number.

        Requests that had not run come first, oldest first, so that one that makes engines fail only delays others that
        had run. Requests that were lost on this link, or that it had no capacity for, wait for SAME_LINK_SECONDS, as
        its engine may be exiting.
        """
        due = [hold for hold in self._holds.values() if hold.link != link or now - hold.added_at >= SAME_LINK_SECONDS]
        due.sort(key=lambda hold: (hold.request.had_run, hold.request.arrived))
        for number, hold in enumerate(due):
            self.discard(hold.request)
            try:
                hold.request.resubmit()
            except ApiError as error:
                if error.status != 503:
                    hold.request.give_up(error)
                    continue
                # The engine is lost again.
                for rest in due[number:]:
                    self._holds[id(rest.request)] = rest
                return number
            except Exception as error:  # an exception must not keep the others waiting
                logger.exception("a request could not be submitted again")
                hold.request.give_up(ApiError(500, f"internal error ({type(error).__name__})", None, "internal_error"))
        return len(due)

    def note_launched(self, request_ids: frozenset[int]) -> None:
        """Notify requests of sequences that their lost engine had started to compute."""
        for hold in list(self._holds.values()):
            if not hold.request.note_launched(request_ids):
                self.discard(hold.request)

    def expire(self, now: float, error: Callable[[], ApiError]) -> None:
        """Fail requests that have waited too long."""
        self._give_up([hold for hold in self._holds.values() if now - hold.since >= self.timeout], error)

    def give_up_all(self, error: ApiError) -> None:
        """Fail all requests."""
        self._give_up(list(self._holds.values()), lambda: error)

    def _give_up(self, holds: Iterable[_Hold], error: Callable[[], ApiError]) -> None:
        for hold in holds:
            self.discard(hold.request)
            hold.request.give_up(error())
