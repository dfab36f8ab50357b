"""Common times of the writes of all streams."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

CALLS_PER_TURN = 256
"""Calls that are made in one turn of the event loop, before other work has its turn."""


class WriteTicks:
    """Ticks at which streams may be written again.

    There are none while no stream waits for one. That all wait for the same tick saves each write a timer, and a
    wake-up of the event loop.
    """

    def __init__(self, interval: float) -> None:
        """Create ticks that are `interval` seconds apart; 0 if no stream waits."""
        self.interval = interval
        self._waiting: dict[Callable[[], None], None] = {}

    def await_next(self, call: Callable[[], None]) -> None:
        """Make a call at the next tick, once, however often it was asked for."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(self.interval, self._tick)
        self._waiting[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        """Drop a call that waits. It may still be made if its tick has come."""
        self._waiting.pop(call, None)

    def _tick(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._make(list(waiting))

    def _make(self, calls: list[Callable[[], None]]) -> None:
        for call in calls[:CALLS_PER_TURN]:
            try:
                call()
            except Exception:  # a bug in one must not cost the others their output
                logger.exception("the output of a stream could not be written")
        if rest := calls[CALLS_PER_TURN:]:
            asyncio.get_running_loop().call_soon(self._make, rest)
