"""Shared memory for sending batches of operations from the loop to a worker.

Without system calls while both sides are busy: each polls a counter that the other side writes last. This relies on
stores becoming visible in program order, as on x86-64. An idle worker sleeps after `AWAKE_SECONDS`.
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
"""Maximum number of matchers per worker."""
MAX_OPERATIONS = 8192
"""Maximum number of operations per batch."""
MAX_FORCED = 60
"""Maximum number of forced tokens reported per matcher; further ones follow after these are accepted."""
AWAKE_SECONDS = 0.005
"""Time that a worker polls after a batch before it sleeps, in seconds; longer than a step of a busy engine."""
ASLEEP_SECONDS = 0.05
"""Polling interval of a sleeping worker, in seconds, in case a wake-up is lost."""

_POSTED, _ACCEPTED, _DONE, _COUNT, _ASLEEP, _REFUSED, _ENDING, _FLAGGED, _HEADER_WORDS = range(9)
_FORCED_WORDS = 1 + MAX_FORCED
_OPERATIONS = 8 * _HEADER_WORDS
_FLAGS = _OPERATIONS + 12 * MAX_OPERATIONS
_HAS_MASK = _FLAGS + MAX_SLOTS
_FORCED = _HAS_MASK + MAX_SLOTS
_SIZE = _FORCED + 4 * _FORCED_WORDS * MAX_SLOTS

OPEN, CLOSE, ACCEPT, EXPECT, MASK, DROP, TAKE = range(7)
"""Operations, each with two operands.

OPEN slot, grammar: copy the matcher of a grammar into the slot.
CLOSE slot: clear the slot.
ACCEPT slot, token: accept a token.
EXPECT slot, index: wait until the device has written the token at an index of `MaskMemory`, then accept it.
MASK slot, index: write the mask to an index of `MaskMemory`.
DROP grammar: delete a grammar.
TAKE slot, token: accept a token without computing the forced tokens after it.

Operations and flags are ints, because combining enum members takes 1 us.
"""
ACCEPTED, STOPPED, FAILED, FORCES, ENDS_FORCED, FORCES_MORE = 1, 2, 4, 8, 16, 32
"""Flags of a matcher after its last operation.

ACCEPTED: it accepted the last token.
STOPPED: only an end id may follow.
FAILED: it has an error and accepts no more tokens.
FORCES: tokens are forced.
ENDS_FORCED: only an end id may follow the forced tokens.
FORCES_MORE: more than MAX_FORCED tokens are forced.
"""


class Channel:
    """Shared memory of one worker, used by both sides."""

    def __init__(self, memory: mmap.mmap, wake_fd: int) -> None:
        """Map the fields of the memory.

        memory: created by `create_memory`; wake_fd: eventfd that wakes a sleeping worker.
        """
        view = memoryview(memory)
        self._header = view[:_OPERATIONS].cast("q")
        self._operations = view[_OPERATIONS:_FLAGS].cast("i")
        self.flags = view[_FLAGS:_HAS_MASK]
        """Flags by slot."""
        self.all_flags: NDArray[np.uint8] = np.frombuffer(self.flags, dtype=np.uint8)
        """`flags` as an array, to read many slots at once."""
        self.has_mask = view[_HAS_MASK:_FORCED]
        """True by slot if its last mask was written; the worker refuses masks that take too long."""
        self._forced = view[_FORCED:_SIZE].cast("i")
        self.num_forced: NDArray[np.int32] = np.frombuffer(self._forced, dtype=np.int32)[::_FORCED_WORDS]
        """Number of forced tokens by slot, valid where the slot's flags include FORCES."""
        self.wake_fd = wake_fd
        self._fence = threading.Lock()
        self._seen = 0

    @property
    def is_done(self) -> bool:
        """True if the worker has finished all posted operations."""
        return self._header[_DONE] == self._header[_POSTED]

    @property
    def has_accepted(self) -> bool:
        """True if the worker has finished all posted operations before the first MASK."""
        return self._header[_ACCEPTED] == self._header[_POSTED]

    def post(self, operations: "array[int]") -> None:
        """Send a batch to the worker, three ints per operation.

        The previous batch must be finished.
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
        """Wait for the next batch and return it, three ints per operation. Called by the worker."""
        header, awake_until = self._header, time.monotonic() + AWAKE_SECONDS
        while header[_POSTED] == self._seen:
            if time.monotonic() < awake_until:
                time.sleep(0)  # lets other threads run
            else:
                self._sleep()
        self._seen = header[_POSTED]
        return self._operations[: 3 * header[_COUNT]]

    def add_flagged(self, count: int) -> None:
        """Count flagged tokens of the batch. Called by the worker.

        A token is flagged if the flags after it are anything but ACCEPTED.
        """
        self._header[_FLAGGED] += count

    def finish_accepting(self) -> None:
        """Signal that all results of the batch except masks are written. Called by the worker."""
        self._header[_ACCEPTED] = self._seen

    def finish_batch(self, num_refused: int, may_end: bool = False) -> None:
        """Signal that all results of the batch are written. Called by the worker.

        num_refused: number of masks that were refused; may_end: True if a written mask allows an end id.
        """
        self._header[_REFUSED] += num_refused
        self._header[_ENDING] += may_end
        self._header[_ACCEPTED] = self._header[_DONE] = self._seen

    @property
    def num_refused(self) -> int:
        """Total number of refused masks."""
        return self._header[_REFUSED]

    @property
    def num_flagged(self) -> int:
        """Total number of flagged tokens (see `add_flagged`)."""
        return self._header[_FLAGGED]

    @property
    def num_ending(self) -> int:
        """Number of batches with a mask that allows an end id."""
        return self._header[_ENDING]

    def write_forced(self, slot: int, tokens: Sequence[int]) -> None:
        """Write the next forced tokens of a slot, at most MAX_FORCED.

        The slot's flags must include FORCES.
        """
        first, known = slot * _FORCED_WORDS, tokens[:MAX_FORCED]
        self._forced[first] = len(known)
        # In reverse order, so that the next one can be dropped.
        for index, token in enumerate(reversed(known), start=first + 1):
            self._forced[index] = token

    def drop_forced(self, slot: int, token: int) -> bool:
        """Drop the next forced token after it was accepted. Called by the worker.

        Returns False, without effect, if another token was forced or the tokens after it are unknown.
        """
        first = slot * _FORCED_WORDS
        count = self._forced[first]
        if not self.flags[slot] & FORCES or count < 2 or self._forced[first + count] != token:
            return False
        self._forced[first] = count - 1
        self.flags[slot] |= ACCEPTED
        return True

    def next_forced(self, slot: int) -> int:
        """Return the next forced token. The slot's flags must include FORCES."""
        first = slot * _FORCED_WORDS
        return self._forced[first + self._forced[first]]

    def forced(self, slot: int) -> list[int]:
        """Return the next forced tokens."""
        if not self.flags[slot] & FORCES:
            return []
        start = slot * _FORCED_WORDS + 1
        return self._forced[start : start + self._forced[start - 1]].tolist()[::-1]

    def close(self) -> None:
        """Close the eventfd. The memory stays readable."""
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
