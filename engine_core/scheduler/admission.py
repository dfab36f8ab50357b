"""What a waiting sequence needs before it may run, and how it gives everything back.

A gate answers "not now" with None, otherwise with the call that undoes it; undoing waits on `sequence.leases`, which
the scheduler closes once, when no step in flight holds the sequence any more.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Protocol

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.plan import PADDING_ROW
from tandem.engine_core.sequence import Sequence

RESERVE = 16
"""An admission leaves a page for each sequence that may still grow, but no more than one in so many of the pool."""


class Gate(Protocol):
    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        """Takes one resource for a sequence, all of it or nothing."""


class RowGate:
    """Rows 1 to `max_rows` of the device's tables."""

    def __init__(self, max_rows: int) -> None:
        self.total = max_rows
        self._free = list(range(max_rows, PADDING_ROW, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        if not self._free:
            return None
        seq.row = self._free.pop()

        def release() -> None:
            assert seq.row not in self._free, f"row {seq.row} freed twice by {seq}"
            self._free.append(seq.row)
            seq.row = -1

        return release


class PageGate:
    """Pages for what a sequence computes first; it grows while it runs.

    A reserve for those that run keeps an admission from being paid for with a preemption soon after. A sequence that
    was preempted asks for everything it has to compute again, and for a larger reserve each time.
    """

    def __init__(self, memory: KVManager, chunk: int) -> None:
        """chunk: positions that a step could compute first; 0: all of them."""
        self.memory = memory
        self.chunk = chunk
        self._holders: dict[int, Sequence] = {}

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        whole = seq.preemptions or not self.chunk
        first = len(seq.tokens) if whole else self.chunk
        if not self.memory.admit(seq, first, self._reserve() * (1 + seq.preemptions)):
            return None
        self._holders[seq.id] = seq

        def release() -> None:
            del self._holders[seq.id]
            self.memory.release(seq)

        return release

    def _reserve(self) -> int:
        """Nothing while nobody can grow, so that any sequence the pool can hold gets its turn."""
        needed = self.memory.needed
        growing = sum([needed(seq.kv_len) > len(seq.pages) for seq in self._holders.values()])
        return min(growing, ceil_div(self.memory.pages.total, RESERVE))


def admit(seq: Sequence, gates: Iterable[Gate]) -> bool:
    """Passes a sequence through every gate or none: what the first gates gave goes back when a later one declines."""
    with ExitStack() as stack:
        for gate in gates:
            release = gate.acquire(seq)
            if release is None:
                return False
            stack.callback(release)
        seq.leases = stack.pop_all()
        return True
