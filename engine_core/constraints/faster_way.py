"""Choice between two ways of the same work by the time that each took lately."""

import math

PROBE_EVERY = 64
"""Choices of which one is of the slower way, whose time may have changed since."""
NEWEST = 0.25
"""Share of the newest time in the average of a way."""


class FasterWay:
    """Two ways, False and True, and what a piece of the work took on each."""

    def __init__(self) -> None:
        self._choices = 0
        self._seconds = {True: 0.0, False: math.inf}
        """Average seconds of a piece; the start of a way that was not taken yet."""

    def choose(self) -> bool:
        """Return the way that was faster, True until both were taken."""
        self._choices += 1
        faster = self._seconds[True] <= self._seconds[False]
        return faster if self._choices % PROBE_EVERY else not faster

    def record(self, way: bool, seconds: float, pieces: int) -> None:
        """Count what some pieces took on one way."""
        newest, known = seconds / pieces, self._seconds[way]
        self._seconds[way] = known + NEWEST * (newest - known) if 0.0 < known < math.inf else newest
