"""Estimate when a queue has room again, from how fast it empties."""

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30
"""Seconds over which departures are counted."""
MAX_SECONDS = 60
"""Longest time that is estimated."""


class Departures:
    """Count what has left a queue during the last WINDOW_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[int, int]] = deque()
        """Departures by the second in which they happened, the oldest first."""

    def add(self, amount: int) -> None:
        """Count departures that happen now."""
        if not amount:
            return
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            amount += self._counts.pop()[1]
        self._counts.append((second, amount))
        self._drop_old(second)

    def seconds_until(self, amount: int) -> int:
        """Estimate the seconds until this many more have left, between 1 and MAX_SECONDS.

        Without a departure to judge by, the estimate is 1.
        """
        now = self._clock()
        self._drop_old(int(now))
        total = sum([count for _, count in self._counts])
        if not total:
            return 1
        rate = total / max(now - self._counts[0][0], 1.0)
        return min(max(math.ceil(amount / rate), 1), MAX_SECONDS)

    def _drop_old(self, second: int) -> None:
        while self._counts and self._counts[0][0] < second - WINDOW_SECONDS:
            self._counts.popleft()
