"""Shared memory through which the loop sends batches of work to a worker.

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

import numpy as np
from numpy.typing import NDArray

SLOT_BITS = 11
MAX_SLOTS = 1 << SLOT_BITS
"""Matchers of one worker."""
MAX_OPERATIONS = 8192
"""Operations of one batch."""
MAX_FORCED = 60
"""Forced tokens that a worker reports of one matcher; those after them are reported once these are accepted."""
AWAKE_SECONDS = 0.005
"""Time after the last batch for which a worker polls for the next one. Steps of a busy engine are shorter."""
ASLEEP_SECONDS = 0.05
"""Time after which a sleeping worker looks by itself."""

_POSTED, _ACCEPTED, _DONE, _COUNT, _ASLEEP, _REFUSED, _ENDING, _FLAGGED, _HEADER_WORDS = range(9)
_FORCED_WORDS = 1 + MAX_FORCED
_OPERATIONS = 8 * _HEADER_WORDS
_FLAGS = _OPERATIONS + 12 * MAX_OPERATIONS
_HAS_MASK = _FLAGS + MAX_SLOTS
_FORCED = _HAS_MASK + MAX_SLOTS
_SIZE = _FORCED + 4 * _FORCED_WORDS * MAX_SLOTS

OPEN, CLOSE, ACCEPT, EXPECT, MASK, DROP, TAKE = range(7)
"""Operations, each with two numbers; the first is a slot: put a copy of the matcher of a grammar, the second number,
into the slot; empty it; let its matcher accept a token; let it accept the token that the device writes to an index of
`MaskMemory`, once it has arrived; write its mask to such an index. DROP forgets a grammar, the first number. TAKE is
ACCEPT of a token after which nothing needs to be known. Plain numbers, as are the flags: members of an enumeration take
a microsecond to combine.
"""
ACCEPTED, STOPPED, FAILED, FORCES, ENDS_FORCED, FORCES_MORE = 1, 2, 4, 8, 16, 32
"""Flags of a matcher after its last operation: it accepted the last token; nothing but an end may follow; it has a
problem and accepts nothing more; tokens are forced; nothing but an end may follow them; they are more than MAX_FORCED.
"""


class Channel:
    """One worker's shared memory, from either side."""

    def __init__(self, memory: mmap.mmap, wake_fd: int) -> None:
        """Map the parts of the memory.

        memory: created by `create_memory`; wake_fd: event that wakes a sleeping worker.
        """
        view = memoryview(memory)
        self._header = view[:_OPERATIONS].cast("q")
        self._operations = view[_OPERATIONS:_FLAGS].cast("i")
        self.flags = view[_FLAGS:_HAS_MASK]
        """Flags of each slot's matcher."""
        self.all_flags: NDArray[np.uint8] = np.frombuffer(self.flags, dtype=np.uint8)
        """The same as an array, to read the flags of many slots."""
        self.has_mask = view[_HAS_MASK:_FORCED]
        """Whether each slot's last mask was written: the worker refuses those that take long."""
        self._forced = view[_FORCED:_SIZE].cast("i")
        self.num_forced: NDArray[np.int32] = np.frombuffer(self._forced, dtype=np.int32)[::_FORCED_WORDS]
        """Number of forced tokens by slot, valid where the slot's flags include FORCES."""
        self.wake_fd = wake_fd
        self._fence = threading.Lock()
        self._seen = 0

    @property
    def is_done(self) -> bool:
        """True once the worker has done all that was posted."""
        return self._header[_DONE] == self._header[_POSTED]

    @property
    def has_accepted(self) -> bool:
        """True once the worker has done all that was posted before the first mask."""
        return self._header[_ACCEPTED] == self._header[_POSTED]

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

    def add_flagged(self, count: int) -> None:
        """Count flagged tokens of the batch, as the worker.

        A token is flagged if the flags after it are not just ACCEPTED.
        """
        self._header[_FLAGGED] += count

    def finish_accepting(self) -> None:
        """Signal, as the worker, that all results of the batch except masks are written."""
        self._header[_ACCEPTED] = self._seen

    def finish_batch(self, num_refused: int, may_end: bool = False) -> None:
        """Signal, as the worker, that all results of the batch are written.

        num_refused: number of masks that are not; may_end: True if one of the others allows an end id.
        """
        self._header[_REFUSED] += num_refused
        self._header[_ENDING] += may_end
        self._header[_ACCEPTED] = self._header[_DONE] = self._seen

    @property
    def num_refused(self) -> int:
        """Number of masks of all batches that were not written."""
        return self._header[_REFUSED]

    @property
    def num_flagged(self) -> int:
        """Number of flagged tokens of all batches (see `add_flagged`)."""
        return self._header[_FLAGGED]

    @property
    def num_ending(self) -> int:
        """Number of batches so far with a mask that allows an end id."""
        return self._header[_ENDING]

    def write_forced(self, slot: int, tokens: Sequence[int]) -> None:
        """Write the tokens that are forced next, at most MAX_FORCED of them.

        The slot's flags must include FORCES.
        """
        first, known = slot * _FORCED_WORDS, tokens[:MAX_FORCED]
        self._forced[first] = len(known)
        # The next one comes last, so that it can be dropped.
        for index, token in enumerate(reversed(known), start=first + 1):
            self._forced[index] = token

    def drop_forced(self, slot: int, token: int) -> bool:
        """Drop a token that was forced next and has been accepted, as the worker.

        Return False, and do nothing, if another token was forced, or if the tokens after it are unknown.
        """
        first = slot * _FORCED_WORDS
        count = self._forced[first]
        if not self.flags[slot] & FORCES or count < 2 or self._forced[first + count] != token:
            return False
        self._forced[first] = count - 1
        self.flags[slot] |= ACCEPTED
        return True

    def next_forced(self, slot: int) -> int:
        """Return the token that is forced next. The slot's flags must include FORCES."""
        first = slot * _FORCED_WORDS
        return self._forced[first + self._forced[first]]

    def forced(self, slot: int) -> list[int]:
        """Return the tokens that are forced next."""
        if not self.flags[slot] & FORCES:
            return []
        start = slot * _FORCED_WORDS + 1
        return self._forced[start : start + self._forced[start - 1]].tolist()[::-1]

    def close(self) -> None:
        """Close the event. Data that was read before stays readable."""
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
