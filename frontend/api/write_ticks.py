"""Common write times of all streams."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

CALLS_PER_TURN = 256
"""Callbacks run per event loop iteration, before other work."""


class WriteTicks:
    """Ticks at which streams may be written.

    There are none while no stream is waiting. Sharing ticks saves a timer and a wakeup of the event loop per write.
    """

    def __init__(self, interval: float) -> None:
        """Create ticks every `interval` seconds; 0 if streams do not wait."""
        self.interval = interval
        self._waiting: dict[Callable[[], None], None] = {}

    def await_next(self, call: Callable[[], None]) -> None:
        """Schedule a callback for the next tick, once, even if requested several times."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(self.interval, self._tick)
        self._waiting[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        """Cancel a callback. It may still run if its tick has started."""
        self._waiting.pop(call, None)

    def _tick(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._make(list(waiting))

    def _make(self, calls: list[Callable[[], None]]) -> None:
        for call in calls[:CALLS_PER_TURN]:
            try:
                call()
            except Exception:  # an exception in one callback must not affect the others
                logger.exception("the output of a stream could not be written")
        if rest := calls[CALLS_PER_TURN:]:
            asyncio.get_running_loop().call_soon(self._make, rest)
