"""What a waiting sequence needs before it may run, and how it gives everything back.

A gate answers "not now" with None, otherwise with the call that undoes it; undoing waits on `sequence.leases`, which
the scheduler closes once, when no step in flight holds the sequence any more.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Protocol

from engine_core.kv_cache.pages import PageAllocator
from engine_core.scheduler.sequence import Sequence

PADDING_ROW = 0
"""Reserved, like page 0: padded rows of a step live here."""


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
    """Pages for prompt and output together: without preemption, a sequence that starts must be able to end."""

    def __init__(self, pages: PageAllocator, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size

    def needed(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        taken = self.pages.allocate(seq.id, self.needed(seq.total_len))
        if taken is None:
            return None
        seq.pages = taken

        def release() -> None:
            self.pages.release(seq.id, seq.pages)
            seq.pages = []

        return release


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
