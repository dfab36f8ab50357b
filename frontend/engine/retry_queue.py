"""Estimate when a full queue has capacity for a refused request.

Previously refused requests return first, at the times given to them.
"""

import math
import random
import time
from collections.abc import Callable

MAX_SECONDS = 60
"""Maximum Retry-After in seconds. OpenAI's client does not retry if it is longer."""
WINDOW_SECONDS = 30.0
"""Time constant for forgetting earlier departures; only time with a full queue counts."""
PRIOR_SECONDS = 3.0
"""Weight of the assumed rate, in seconds of observation."""
_JITTER = 0.25
"""Maximum fraction of random jitter added to an estimate, as departures are burstier than returns."""


class RetryQueue:
    """Spread the returns of refused requests over the time in which a full queue drains.

    Amounts are sequences or tokens. Few of the clients that respect Retry-After are refused again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, uniform: Callable[[], float] | None = None) -> None:
        """uniform: returns random numbers in [0, 1)."""
        self._clock = clock
        self._uniform = uniform or random.random
        self._departed = 0.0
        self._full_seconds = 0.0
        self._observed_at = 0.0
        self._was_full = False
        self._returns: dict[int, int] = {}
        """Refused amounts, by the second in which they return."""

    def observe(self, departed: int, is_full: bool) -> None:
        """Record the amount that has left since the last call.

        A queue that is not full drains at its arrival rate, which is not informative.
        """
        now = self._clock()
        if self._was_full:
            seconds = now - self._observed_at
            kept = math.exp(-seconds / WINDOW_SECONDS)
            self._departed = self._departed * kept + departed
            self._full_seconds = self._full_seconds * kept + seconds
        self._observed_at, self._was_full = now, is_full

    def refuse(self, excess: int, amount: int, assumed_rate: float, sharers: int = 1) -> int:
        """Return the Retry-After of a refused request, between 1 and MAX_SECONDS.

        excess: amount that must leave before `amount` fits, if nothing else returns. assumed_rate: amount per second
        that leaves, used before any observation. sharers: number of processes that refuse as many requests for the same
        queue.
        """
        now = self._clock()
        self._returns = {back: amount for back, amount in self._returns.items() if back > now}
        returning = sum(self._returns.values()) * sharers
        rate = (self._departed + assumed_rate * PRIOR_SECONDS) / (self._full_seconds + PRIOR_SECONDS)
        seconds = (max(excess, 1) + returning) / rate * (1 + _JITTER * self._uniform())
        if seconds > MAX_SECONDS:  # beyond the horizon: not in the queue, but must not return all at once
            seconds = MAX_SECONDS * (1 - self._uniform() / 2)
        retry_after = max(math.ceil(seconds), 1)
        back = math.ceil(now + retry_after)
        self._returns[back] = self._returns.get(back, 0) + amount
        return retry_after
