"""Requests that wait for the engine to come back."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct

from tandem.frontend.errors import ApiError

logger = logging.getLogger(__name__)

SAME_LINK_SECONDS = 2.0
"""Seconds after which a request is submitted again on the link that it was lost on, if that is ready after all."""


class HeldRequest(Protocol):
    """Request that lost its engine before any part of its answer was sent."""

    @property
    def had_run(self) -> bool:
        """True if an engine had begun to compute it."""

    @property
    def arrived(self) -> float:
        """Time of its arrival, in seconds."""

    def note_launched(self, request_ids: frozenset[int]) -> bool:
        """Learn which sequences a lost engine had begun to compute.

        Return False if the request ends for that.
        """

    def resubmit(self) -> None:
        """Submit all its sequences. Raises ApiError while the engine is not ready."""

    def give_up(self, error: ApiError) -> None:
        """End the request with this error."""


class _Hold(Struct):
    request: HeldRequest
    link: int
    added_at: float
    since: float
    """Time from which its wait counts."""


class HeldRequests:
    """Table of the requests that wait for the engine.

    Each waits for at most `timeout` seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._holds: dict[int, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, request: HeldRequest, link: int, now: float, since: float) -> None:
        """Hold a request that was lost or refused on the link of this number.

        Its wait counts from `since`.
        """
        self._holds[id(request)] = _Hold(request, link, now, since)

    def discard(self, request: HeldRequest) -> None:
        """Forget a request, if it is held."""
        self._holds.pop(id(request), None)

    def resubmit(self, link: int, now: float) -> int:
        """Submit requests again on the link of this number; return how many were.

        Those that had not run come first, and of them the oldest: one that makes engines fail delays only others that
        had run. Requests that were lost on this very link wait for SAME_LINK_SECONDS, since its engine may be ending,
        as do those for which it had no room.
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
                # The engine is away again.
                for rest in due[number:]:
                    self._holds[id(rest.request)] = rest
                return number
            except Exception as error:  # a bug must not keep the others waiting
                logger.exception("a request could not be submitted again")
                hold.request.give_up(ApiError(500, f"internal error ({type(error).__name__})", None, "internal_error"))
        return len(due)

    def note_launched(self, request_ids: frozenset[int]) -> None:
        """Tell the requests what the engine that they lost had begun to compute."""
        for hold in list(self._holds.values()):
            if not hold.request.note_launched(request_ids):
                self.discard(hold.request)

    def expire(self, now: float, error: Callable[[], ApiError]) -> None:
        """Give up the requests that have waited for too long."""
        self._give_up([hold for hold in self._holds.values() if now - hold.since >= self.timeout], error)

    def give_up_all(self, error: ApiError) -> None:
        """Give up every request."""
        self._give_up(list(self._holds.values()), lambda: error)

    def _give_up(self, holds: Iterable[_Hold], error: Callable[[], ApiError]) -> None:
        for hold in holds:
            self.discard(hold.request)
            hold.request.give_up(error())
