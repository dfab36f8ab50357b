"""Estimate when a full queue has room for a request that was refused.

The requests refused before come back first, each when it was told to.
"""

import math
import random
import time
from collections.abc import Callable

MAX_SECONDS = 60
"""Longest time that a client is told. OpenAI's client gives up a request that is to wait for longer."""
WINDOW_SECONDS = 30.0
"""Time constant with which earlier departures are forgotten; only time in which the queue was full counts."""
PRIOR_SECONDS = 3.0
"""Weight of the assumed rate, in seconds of observation."""
_JITTER = 0.25
"""Largest share by which a time is longer than the estimate: what leaves is not as even as the returns."""


class RetryQueue:
    """Spread the returns of refused requests over the time in which a full queue empties.

    Amounts are in sequences or in tokens. Of clients that wait as long as they are told, few are refused again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, uniform: Callable[[], float] | None = None) -> None:
        """`uniform` returns random numbers in [0, 1)."""
        self._clock = clock
        self._uniform = uniform or random.random
        self._departed = 0.0
        self._full_seconds = 0.0
        self._observed_at = 0.0
        self._was_full = False
        self._returns: dict[int, int] = {}
        """Amounts that were refused, by the second until which they return."""

    def observe(self, departed: int, is_full: bool) -> None:
        """Take the amount into account that has left since the last call.

        A queue that is not full empties at the rate at which it is filled, which tells nothing.
        """
        now = self._clock()
        if self._was_full:
            seconds = now - self._observed_at
            kept = math.exp(-seconds / WINDOW_SECONDS)
            self._departed = self._departed * kept + departed
            self._full_seconds = self._full_seconds * kept + seconds
        self._observed_at, self._was_full = now, is_full

    def refuse(self, excess: int, amount: int, assumed_rate: float, sharers: int = 1) -> int:
        """Return the seconds after which a refused request is to return, between 1 and MAX_SECONDS.

        excess: what has to leave before there is room for its `amount`, if nothing else returns. assumed_rate: amount
        that leaves in a second, as far as nothing was observed. sharers: processes that refuse as many requests as this
        one does, for the same queue.
        """
        now = self._clock()
        self._returns = {back: amount for back, amount in self._returns.items() if back > now}
        ahead = sum(self._returns.values()) * sharers
        rate = (self._departed + assumed_rate * PRIOR_SECONDS) / (self._full_seconds + PRIOR_SECONDS)
        seconds = (max(excess, 1) + ahead) / rate * (1 + _JITTER * self._uniform())
        if seconds > MAX_SECONDS:  # these have no place in the queue yet, and must not come all at once
            seconds = MAX_SECONDS * (1 - self._uniform() / 2)
        told = max(math.ceil(seconds), 1)
        back = math.ceil(now + told)
        self._returns[back] = self._returns.get(back, 0) + amount
        return told
