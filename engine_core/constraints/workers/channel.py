"""Shared memory through which the loop gives a worker work, a batch at a time.

Neither side makes a system call while the other is at work: each polls a number that the other sets last. That relies
on stores that become visible in their order, as on x86-64. A worker that has had nothing to do for a while sleeps.
"""

import mmap
import os
import select
import threading
import time
from array import array
from collections.abc import Sequence

MAX_SLOTS = 2048
"""Matchers of one worker."""
MAX_OPERATIONS = 8192
"""Operations of one batch."""
MAX_FORCED = 60
"""Forced tokens that a worker reports of one matcher; those after them are reported once these are accepted."""
AWAKE_SECONDS = 0.005
"""Time after the last batch for which a worker polls for the next one. Steps of a busy engine are shorter."""
ASLEEP_SECONDS = 0.05
"""Time after which a sleeping worker looks by itself."""

_POSTED, _DONE, _COUNT, _ASLEEP, _REFUSED, _HEADER_WORDS = range(6)
_FLAGS, _HAS_MASK, _NUM_FORCED, _FORCED = range(4)
_RESULT_WORDS = _FORCED + MAX_FORCED
_OPERATIONS = 8 * _HEADER_WORDS
_RESULTS = _OPERATIONS + 12 * MAX_OPERATIONS
_SIZE = _RESULTS + 4 * _RESULT_WORDS * MAX_SLOTS

OPEN, CLOSE, ACCEPT, MASK, DROP = range(5)
"""Operations, each with two numbers, of which the first is a slot: put a copy of the matcher of a grammar, the second
number, into the slot; empty it; let its matcher accept a token; write its mask to a place of `MaskMemory`. DROP forgets
a grammar, the first number. Plain numbers, as are the flags: members of an enumeration take a microsecond to combine.
"""
ACCEPTED, STOPPED, FAILED, ENDS_FORCED, FORCES_MORE = 1, 2, 4, 8, 16
"""Flags of a matcher after its last operation: it accepted the last token; nothing but an end may follow; it has a
problem and accepts nothing more; nothing but an end may follow its forced tokens; more than MAX_FORCED are forced."""


class Channel:
    """One worker's shared memory, from either side."""

    def __init__(self, memory: mmap.mmap, wake_fd: int) -> None:
        """Map the parts of the memory.

        memory: as of `create_memory`; wake_fd: event that wakes a sleeping worker.
        """
        view = memoryview(memory)
        self._header = view[:_OPERATIONS].cast("q")
        self._operations = view[_OPERATIONS:_RESULTS].cast("i")
        self._results = view[_RESULTS:_SIZE].cast("i")
        self.wake_fd = wake_fd
        self._fence = threading.Lock()
        self._seen = 0

    @property
    def is_done(self) -> bool:
        """True once the worker has done all that was posted."""
        return self._header[_DONE] == self._header[_POSTED]

    def post(self, operations: "array[int]") -> None:
        """Give the worker a batch: three numbers for each operation.

        The batch before must be done.
        """
        assert self.is_done and len(operations) <= 3 * MAX_OPERATIONS, f"{len(operations) // 3} operations"
        self._operations[: len(operations)] = memoryview(operations)
        self._header[_COUNT] = len(operations) // 3
        self._header[_POSTED] += 1
        with self._fence:
            pass  # A lock is a barrier: the worker sees the batch, or this thread that it sleeps.
        if self._header[_ASLEEP]:
            os.eventfd_write(self.wake_fd, 1)

    def next_batch(self) -> "memoryview[int]":
        """Wait for the next batch as its worker.

        Return three numbers for each operation.
        """
        header, awake_until = self._header, time.monotonic() + AWAKE_SECONDS
        while header[_POSTED] == self._seen:
            if time.monotonic() < awake_until:
                time.sleep(0)  # lets other threads run
            else:
                self._sleep()
        self._seen = header[_POSTED]
        return self._operations[: 3 * header[_COUNT]]

    def finish_batch(self, num_refused: int) -> None:
        """Say as the worker that all results of the batch are written.

        num_refused: number of masks that are not.
        """
        self._header[_REFUSED] += num_refused
        self._header[_DONE] = self._seen

    @property
    def num_refused(self) -> int:
        """Number of masks of all batches that were not written."""
        return self._header[_REFUSED]

    @property
    def is_wanted(self) -> bool:
        """True, for the worker, if a batch waits for it."""
        return self._header[_POSTED] != self._seen

    def write_state(self, slot: int, flags: int, forced: Sequence[int] = ()) -> None:
        """Write what is known of a slot's matcher."""
        first = slot * _RESULT_WORDS
        results, count = self._results, min(len(forced), MAX_FORCED)
        results[first + _FLAGS], results[first + _NUM_FORCED] = flags, count
        for index in range(count):
            results[first + _FORCED + index] = forced[index]

    def flags(self, slot: int) -> int:
        """Return the flags of a slot's matcher."""
        return self._results[slot * _RESULT_WORDS + _FLAGS]

    def forced(self, slot: int) -> list[int]:
        """Return the tokens that are forced next, at most MAX_FORCED."""
        first = slot * _RESULT_WORDS
        start = first + _FORCED
        return self._results[start : start + self._results[first + _NUM_FORCED]].tolist()

    def write_mask(self, slot: int, is_written: bool) -> None:
        """Say as the worker whether the slot's mask was written."""
        self._results[slot * _RESULT_WORDS + _HAS_MASK] = is_written

    def has_mask(self, slot: int) -> bool:
        """Return whether the slot's last mask was written.

        The worker refuses those that take long.
        """
        return bool(self._results[slot * _RESULT_WORDS + _HAS_MASK])

    def close(self) -> None:
        """Close the event. What was read before stays readable."""
        wake_fd, self.wake_fd = self.wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)

    def _sleep(self) -> None:
        header = self._header
        header[_ASLEEP] = 1
        with self._fence:
            pass
        if header[_POSTED] == self._seen and select.select([self.wake_fd], [], [], ASLEEP_SECONDS)[0]:
            os.eventfd_read(self.wake_fd)
        header[_ASLEEP] = 0


def create_memory() -> int:
    """Return a file descriptor of new, zeroed memory for a channel."""
    fd = os.memfd_create("tandem-grammar-worker")
    os.ftruncate(fd, _SIZE)
    return fd


def map_memory(fd: int) -> mmap.mmap:
    """Map the memory of a channel."""
    return mmap.mmap(fd, _SIZE)
