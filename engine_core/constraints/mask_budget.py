"""Limits on the CPU time of masks, for a request and for an API key.

A step waits for the masks of all its rows, so that one expensive grammar delays every stream. At a vocabulary of 128k
tokens a mask of an ordinary grammar takes 0.01 to 1 ms, seldom 5 ms while its tables are cold, and one of an ambiguous
grammar up to 0.2 s. Only time above FREE_SECONDS counts. It is CPU time of the thread that computes, so that a loaded
or a stopped machine ends no request.
"""

from collections.abc import Callable

from msgspec import Struct

FREE_SECONDS = 0.003
"""CPU time of a mask that counts for nothing; a cheaper mask pays back part of the request's earlier excess."""
REQUEST_SECONDS = 0.5
"""CPU time beyond it that the masks of a request may take."""
KEY_SECONDS, KEY_RATE = 0.5, 0.05
"""CPU time that the masks of an API key may take at once, and for each second afterwards, beyond CLEAR_SECONDS of each
request."""
CLEAR_SECONDS = 0.03
"""CPU time beyond it that the masks of a request may take while its key has none left. It does not count for the key:
ordinary grammars take up to 0.014 s while their tables are cold, and even many of them at once must go on."""
ADVICE = "write the grammar so that each text can be parsed in one way only, or make it smaller"


class MaskCost(Struct):
    """CPU time of the masks of one request."""

    key: str = ""
    """Name of the API key, "" for none."""
    debt: float = 0.0
    """Part beyond FREE_SECONDS a mask, in seconds; never negative."""


class MaskBudget:
    """Budgets of all requests and keys. Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Set the clock, in seconds, with which keys regain their budget."""
        self.clock = clock
        self._debts: dict[str, tuple[float, float]] = {}
        """Seconds of KEY_SECONDS that the masks of a key have used, and the time of that count."""

    def charge(self, cost: MaskCost, seconds: float) -> str:
        """Count one mask, and return the `problem` of its request."""
        over = seconds - FREE_SECONDS
        cost.debt = max(0.0, cost.debt + over)
        counted = min(over, cost.debt - CLEAR_SECONDS)
        if counted > 0:
            now = self.clock()
            self._debts = {key: (left, now) for key in self._debts if (left := self._left(key, now)) > 0}
            self._debts[cost.key] = (self._left(cost.key, now) + counted, now)
        return self.problem(cost)

    def problem(self, cost: MaskCost) -> str:
        """Return the reason why a request must end, for the client.

        Empty if its masks may go on.
        """
        if cost.debt <= CLEAR_SECONDS:
            return ""
        took = f"its masks took {cost.debt:.2f} s of CPU time beyond {FREE_SECONDS * 1e3:g} ms each"
        if cost.debt > REQUEST_SECONDS:
            return f"{took}, and the limit is {REQUEST_SECONDS:g} s; {ADVICE}"
        if self._left(cost.key, self.clock()) > KEY_SECONDS:
            whose = "of this API key" if cost.key else "without an API key"
            return (
                f"{took}, and the costly ones of all requests {whose} have taken {KEY_SECONDS:g} s together; {ADVICE}"
            )
        return ""

    def _left(self, key: str, now: float) -> float:
        """Return the seconds that a key has not regained yet."""
        debt, counted = self._debts.get(key, (0.0, now))
        return max(0.0, debt - KEY_RATE * (now - counted))
