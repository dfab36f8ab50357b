"""Admission of waiting sequences through gates to rows and pages.

A gate declines with None, or returns the call that undoes the admission. Those calls are kept on `sequence.leases`,
which the scheduler closes once, when no step in flight holds the sequence any more.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Protocol

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.lora.adapters import Adapters
from tandem.engine_core.plan import PADDING_ROW
from tandem.engine_core.scheduler.queue import WaitingQueue
from tandem.engine_core.sequence import Sequence

MAX_RESERVE_FRACTION = 16
"""An admission leaves one page of each KV group for each sequence that may still grow, but at most 1/16 of the pool."""
MAX_BYPASSED = 64
"""Sequences at the head of the queue that may wait for a shared page while those behind them are admitted."""


class Gate(Protocol):
    """Access to one resource."""

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        """Take the resource for a sequence, all of it or nothing.

        Return the call that gives it back.
        """


class RowGate:
    """Gate to rows 1 to `max_rows` of the device's tables."""

    def __init__(self, max_rows: int) -> None:
        self.total = max_rows
        self._free = list(range(max_rows, PADDING_ROW, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        if not self._free:
            return None
        seq.row = self._free.pop()
        self._taken.add(seq.row)

        def release() -> None:
            assert seq.row in self._taken, f"row {seq.row} freed twice by {seq}"
            self._taken.remove(seq.row)
            self._free.append(seq.row)
            seq.row = -1

        return release


class PageGate:
    """Gate to the pages that a sequence needs first; it gets more while it runs.

    A reserve for the running sequences keeps an admission from causing a preemption soon after. A sequence that was
    preempted asks for everything that it has to compute again, and for a larger reserve each time.
    """

    def __init__(self, memory: KVManager, chunk: int) -> None:
        """Start without holders.

        chunk: positions that a first step could compute; 0: all of them.
        """
        self.memory = memory
        self.chunk = chunk
        self._holders: dict[int, Sequence] = {}
        self._num_growing = 0
        """Number of holders that lacked pages when `_counted_at` was noted."""
        self._counted_at = -1
        """`PageAllocator.num_allocated` when the growing holders were counted; -1 if a holder has left since."""

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        keep = self._reserve() * (1 + seq.preemptions)
        if not self.memory.admit(seq, self.chunk, keep, whole=seq.preemptions > 0, alone=not self._holders):
            return None
        self._holders[seq.id] = seq
        self._num_growing += self.memory.lacks_pages(seq, seq.kv_len)
        self._counted_at = self.memory.pages.num_allocated

        def release() -> None:
            del self._holders[seq.id]
            self._counted_at = -1
            self.memory.release(seq)

        return release

    def _reserve(self) -> int:
        """Return the number of pages to keep free.

        It is 0 if no holder can grow, so that any sequence gets its turn. The holders are counted again only if one of
        them got pages or left, so that a burst of admissions counts them once.
        """
        pages = self.memory.pages
        if self._counted_at != pages.num_allocated:
            self._num_growing = self.memory.num_lacking_pages(self._holders.values())
            self._counted_at = pages.num_allocated
        return min(self._num_growing * self.memory.num_groups, ceil_div(pages.total, MAX_RESERVE_FRACTION))


def admit(seq: Sequence, gates: Iterable[Gate]) -> bool:
    """Pass a sequence through all gates or none.

    If a gate declines, the resources acquired from earlier gates are released.
    """
    with ExitStack() as stack:
        for gate in gates:
            release = gate.acquire(seq)
            if release is None:
                return False
            stack.callback(release)
        seq.leases = stack.pop_all()
        return True


class AdapterGate:
    """Gate to the slot of a sequence's adapter, which `Admission` has found to be resident."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters

    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        return _nothing if seq.adapter is None else self.adapters.acquire(seq.adapter)


def _nothing() -> None:
    return None


class Admission:
    """Admission of waiting sequences, in the order of the queue."""

    def __init__(self, rows: RowGate, memory: KVManager, chunk: int, adapters: Adapters | None = None) -> None:
        """Start with nothing declined.

        chunk: positions that a first step could compute; 0: all of them; adapters: None if no sequence has one.
        """
        self.memory = memory
        self.adapters = adapters
        gates: tuple[Gate, ...] = (rows, PageGate(memory, chunk))
        self._gates = gates if adapters is None else (*gates, AdapterGate(adapters))
        self._declined = (-1, -1)
        """Id of the sequence that the gates declined last, and `KVManager.epoch` then: until that changes they would
        decline it again."""

    def admit(self, waiting: WaitingQueue, begun_only: bool = False) -> list[Sequence]:
        """Take sequences out of the queue while every gate accepts them.

        Return those taken. One whose adapter is in no slot waits for it without blocking the others, and so does one
        whose next page is being computed by a running sequence. begun_only: True to take only those of requests
        that have begun.
        """
        admitted: list[Sequence] = []
        num_bypassed = 0
        for seq in waiting:
            if begun_only and not seq.group.has_begun:
                continue
            if self.adapters is not None and seq.adapter is not None and self.adapters.defers(seq.adapter):
                continue
            if self.memory.waits_for_prefix(seq):
                num_bypassed += 1
                if num_bypassed > MAX_BYPASSED:
                    break
                continue
            if self._declined == (seq.id, self.memory.epoch):
                break
            if not admit(seq, self._gates):
                self._declined = (seq.id, self.memory.epoch)
                break
            waiting.remove(seq)
            admitted.append(seq)
        return admitted
