"""Clock that excludes time during which this process was stalled."""

import time
from collections.abc import Callable

TICK_SECONDS = 0.25
"""Seconds between two ticks."""
MAX_LAG = 1.0
"""Seconds by which a tick may be late; a longer delay counts as a stall of this process."""


class StallAwareClock:
    """Clock in seconds that advances only while its ticks are on time.

    A process that was stopped, or got no CPU time, cannot conclude from missing heartbeats that others hang. `clock`
    returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_at = clock()
        self._now = 0.0

    def __call__(self) -> float:
        """Return the seconds counted up to the last tick."""
        return self._now

    def tick(self) -> None:
        """Add the time since the last tick, or one interval after a stall.

        Call this every `TICK_SECONDS`.

        """
        now = self._clock()
        passed = now - self._ticked_at
        self._now += passed if passed <= TICK_SECONDS + MAX_LAG else TICK_SECONDS
        self._ticked_at = now
