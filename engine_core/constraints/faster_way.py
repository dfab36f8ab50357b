"""Choice between two ways of the same work by the time that each took lately."""

import math

PROBE_EVERY, MOST_RARELY = 64, 8
"""Choices of which one is of the slower way, whose time may have changed since. They are as many times more as it takes
longer, but at most MOST_RARELY times, so that trying it costs little."""
NEWEST, OUTLIER = 0.25, 2.0
"""Share of the newest time in the average of a way, and multiple of the average that this time counts as at most: a
machine may stand still."""


class FasterWay:
    """Two ways, False and True, and what a piece of the work took on each."""

    def __init__(self) -> None:
        self._since_probe = 0
        self._seconds = {True: 0.0, False: math.inf}
        """Average seconds of a piece; the start of a way that was not taken yet."""

    def choose(self) -> bool:
        """Return the way that was faster, True until both were taken."""
        self._since_probe += 1
        faster = self._seconds[True] <= self._seconds[False]
        if self._since_probe < PROBE_EVERY * min(self._ratio(), MOST_RARELY):
            return faster
        self._since_probe = 0
        return not faster

    def record(self, way: bool, seconds: float, pieces: int) -> None:
        """Count what some pieces took on one way."""
        newest, known = seconds / pieces, self._seconds[way]
        if 0.0 < known < math.inf:
            newest = known + NEWEST * (min(newest, OUTLIER * known) - known)
        self._seconds[way] = newest

    def _ratio(self) -> float:
        """Return how many times longer the slower way takes; 1 until that is known."""
        fast, slow = sorted(self._seconds.values())
        return slow / fast if fast > 0.0 and slow < math.inf else 1.0
