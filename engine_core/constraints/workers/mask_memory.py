"""Shared arrays of masks that workers write, and of tokens that they read."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

_INDEX_BITS = 20
"""Number of low bits of an index that address a mask or token within its array; the high bits select the array."""
_INDEX_MASK = (1 << _INDEX_BITS) - 1
MAX_FOUND = 32
"""Size of the cache of `find`, in views. An engine has two for each slot."""
_BITS = np.left_shift(1, np.arange(32, dtype=np.uint32), dtype=np.uint32).view(np.int32)
"""The 32 single-bit words of a mask."""


class MaskMemory:
    """Arrays of masks, or of tokens, in memory that other processes can map."""

    def __init__(self) -> None:
        self.arrays: list[Ints] = []
        self._addresses: list[int] = []
        self._found: dict[int, tuple[object, int | None]] = {}
        """Cache of `find` by `id` of the view; looking up an address takes 4 us."""
        self.fds: list[int] = []
        """File descriptors of the arrays, in allocation order."""

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def allocate(self, rows: int, words: int) -> Ints:
        """Return a new zeroed array, [rows, words] int32, contiguous."""
        fd = os.memfd_create("tandem-masks")
        os.ftruncate(fd, 4 * rows * words)
        array = np.frombuffer(mmap.mmap(fd, 4 * rows * words), dtype=np.int32).reshape(rows, words)
        self.arrays.append(array)
        self._addresses.append(array.ctypes.data)
        self.fds.append(fd)
        return array

    def find(self, view: Ints | memoryview) -> int | None:
        """Return `first_index` of an array, or None if it is not in this memory."""
        known = self._found.get(id(view))
        if known is not None and known[0] is view:
            return known[1]
        address = np.asarray(view).ctypes.data
        found = self._addresses.index(address) << _INDEX_BITS if address in self._addresses else None
        if len(self._found) >= MAX_FOUND:
            self._found.clear()
        self._found[id(view)] = view, found
        return found

    def first_index(self, array: Ints) -> int:
        """Return the index of an array's first mask or token in operations of workers.

        Indices within an array are consecutive. Raises ValueError if the array is not in this memory.
        """
        first = self.find(array)
        if first is None:
            raise ValueError("the array is not of the workers' memory")
        return first


def bits_of(ids: Sequence[int]) -> tuple[NDArray[np.int64], Ints]:
    """Return the indices of the mask words that contain some token ids, and the bits in each word."""
    # Several ids may share a word.
    words = np.unique(np.array(ids, dtype=np.int64) // 32)
    bits = np.zeros(len(words), dtype=np.int32)
    for token in ids:
        bits[words == token // 32] |= _BITS[token % 32]
    return words, bits


class MappedMasks:
    """Arrays of `MaskMemory`, mapped into a worker."""

    def __init__(self, fds: list[int], row_bytes: int, end_ids: Sequence[int] = ()) -> None:
        """Map all arrays.

        row_bytes: size of a mask in bytes; end_ids: token ids that end a sequence.
        """
        self.row_bytes = row_bytes
        maps = [mmap.mmap(fd, os.fstat(fd).st_size) for fd in fds]
        self._words = [memoryview(each).cast("i") for each in maps]
        self._arrays = [np.frombuffer(each, dtype=np.int32) for each in maps]
        self._addresses = [array.ctypes.data for array in self._arrays]
        self._end_words, self._end_bits = bits_of(end_ids)

    def may_end(self, indices: Sequence[int]) -> bool:
        """Return True if any of some masks allows an end id."""
        for number, array in enumerate(self._arrays):
            rows = np.array(
                [index & _INDEX_MASK for index in indices if index >> _INDEX_BITS == number], dtype=np.int64
            )
            if (array[rows[:, None] * (self.row_bytes // 4) + self._end_words] & self._end_bits).any():
                return True
        return False

    def write_one(self, index: int, token: int) -> None:
        """Write a mask that allows one token."""
        words = self.row_bytes // 4
        first = (index & _INDEX_MASK) * words
        mask = self._arrays[index >> _INDEX_BITS][first : first + words]
        mask[:] = 0
        mask[token // 32] = _BITS[token % 32]

    def token(self, index: int) -> int:
        """Return the token at an index."""
        return self._words[index >> _INDEX_BITS][index & _INDEX_MASK]

    def address(self, index: int) -> int:
        """Return the address of a mask."""
        return self._addresses[index >> _INDEX_BITS] + (index & _INDEX_MASK) * self.row_bytes
