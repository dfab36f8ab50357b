"""Clock that stands still while its own process is held up."""

import time
from collections.abc import Callable

TICK_SECONDS = 0.25
"""Interval between two ticks."""
MAX_LAG = 1.0
"""Seconds by which a tick may be late; a longer delay is that of this process and does not count."""


class StallAwareClock:
    """Clock in seconds that counts only while its ticks come on time.

    What a process that was stopped for a while, or got no CPU time, has not heard meanwhile says nothing about those
    that it watches. `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_at = clock()
        self._now = 0.0

    def __call__(self) -> float:
        """Return the seconds counted until the last tick."""
        return self._now

    def tick(self) -> None:
        """Count the time since the last tick, or one interval if that is long past.

        Call this every `TICK_SECONDS`.
        """
        now = self._clock()
        passed = now - self._ticked_at
        self._now += passed if passed <= TICK_SECONDS + MAX_LAG else TICK_SECONDS
        self._ticked_at = now
