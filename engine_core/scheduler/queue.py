"""The order of those who wait."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from tandem.engine_core.scheduler.logprobs import max_logprobs
from tandem.engine_core.sequence import Sequence


class Running:
    """Sequences with a row, and which of them need more of a step than one position."""

    def __init__(self) -> None:
        self.members: dict[int, Sequence] = {}
        """By id, in the order of admission."""
        self.unsteady: set[int] = set()
        """Ids of those that are not settled."""
        self.constrained: set[int] = set()
        """Ids of those that follow a grammar."""
        self._observed: dict[int, int] = {}
        """Those that want log-probabilities, with the most alternatives that they want."""

    @property
    def logprobs(self) -> int:
        """As in `StepPlan`."""
        return max(self._observed.values()) if self._observed else -1

    def enter(self, seq: Sequence) -> None:
        self.members[seq.id] = seq
        self.unsteady.add(seq.id)
        if seq.constraint is not None:
            self.constrained.add(seq.id)
        wanted = max_logprobs(seq)
        if wanted >= 0:
            self._observed[seq.id] = wanted

    def leave(self, seq: Sequence) -> None:
        """Nothing for one that does not run."""
        self.members.pop(seq.id, None)
        self.unsteady.discard(seq.id)
        self.constrained.discard(seq.id)
        self._observed.pop(seq.id, None)


ARRIVALS_PER_PRIORITY = 64
"""Arrivals that one step of priority is worth. A waiting sequence is overtaken by at most this many later arrivals for
each step that their priority is above its own, so none waits indefinitely."""


class WaitingQueue:
    """Sequences by arrival, or by seniority, as those that were preempted always are: whom a higher priority drove out
    does not come back to the head, to hold up the others and be driven out again."""

    def __init__(self, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._order: list[tuple[int, int]] = []
        self._members: dict[int, Sequence] = {}
        self._stays: list[tuple[float, int]] = []
        """When each of them came, the earliest first."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Whoever came out may be removed meanwhile."""
        for _, seq_id in tuple(self._order):
            yield self._members[seq_id]

    @property
    def longest(self) -> Sequence | None:
        """Who has been in the queue for longest, whatever the order."""
        return self._members[self._stays[0][1]] if self._stays else None

    def push(self, seq: Sequence) -> None:
        self._members[seq.id] = seq
        insort(self._order, self._key(seq))
        insort(self._stays, (seq.queued_at, seq.id))

    def remove(self, seq: Sequence) -> None:
        """Raises KeyError for one that does not wait."""
        del self._members[seq.id]
        del self._order[bisect_left(self._order, self._key(seq))]
        del self._stays[bisect_left(self._stays, (seq.queued_at, seq.id))]

    def reorder(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._order = sorted([self._key(seq) for seq in self._members.values()])

    def _key(self, seq: Sequence) -> tuple[int, int]:
        return seniority(seq) if self._by_priority or seq.preemptions else (seq.id, seq.id)


def seniority(seq: Sequence) -> tuple[int, int]:
    """Sorts by arrival with a head start for priority; the least is the most senior."""
    return (seq.id - ARRIVALS_PER_PRIORITY * seq.priority, seq.id)
