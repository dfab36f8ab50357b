"""Arrays of masks in memory that workers map."""

import ctypes
import gc
import os

import numpy as np
import pytest

from tandem.engine_core.constraints.workers.mask_memory import MappedMasks, MaskMemory

WORDS = 5


def test_arrays_are_zeroed_and_contiguous() -> None:
    array = MaskMemory().allocate(3, WORDS)
    assert array.shape == (3, WORDS) and array.dtype == np.int32 and array.flags.c_contiguous
    assert not array.any()
    array[:] = 7


def test_each_mask_of_each_array_has_its_index() -> None:
    """A worker writes by index, and the engine reads it in its own mapping."""
    memory = MaskMemory()
    arrays = [memory.allocate(rows, WORDS) for rows in (4, 1, 9)]
    mapped = MappedMasks(memory.fds, 4 * WORDS)
    expected = [array.copy() for array in arrays]
    for number, array in enumerate(arrays):
        for index in range(len(array)):
            row = np.arange(WORDS, dtype=np.int32) + 100 * number + 10 * index
            expected[number][index] = row
            ctypes.memmove(mapped.address(memory.first_index(array) + index), row.ctypes.data, row.nbytes)
    for array, wanted in zip(arrays, expected, strict=True):
        assert (array == wanted).all()


def test_what_the_engine_writes_is_seen_by_the_worker() -> None:
    memory = MaskMemory()
    memory.allocate(2, WORDS)
    array = memory.allocate(2, WORDS)
    mapped = MappedMasks(memory.fds, 4 * WORDS)
    array[1, 3] = 42
    address = mapped.address(memory.first_index(array) + 1)
    assert ctypes.c_int32.from_address(address + 4 * 3).value == 42


def test_first_rows_of_an_array_have_its_index() -> None:
    memory = MaskMemory()
    memory.allocate(4, WORDS)
    array = memory.allocate(4, WORDS)
    assert memory.first_index(array[:2]) == memory.first_index(array) != 0


def test_a_foreign_array_is_refused() -> None:
    memory = MaskMemory()
    array = memory.allocate(4, WORDS)
    for foreign in (np.zeros((4, WORDS), dtype=np.int32), array[1:], MaskMemory().allocate(4, WORDS)):
        with pytest.raises(ValueError, match="memory"):
            memory.first_index(foreign)


def test_an_end_is_found_in_any_array() -> None:
    memory = MaskMemory()
    arrays = [memory.allocate(4, WORDS) for _ in range(2)]
    mapped = MappedMasks(memory.fds, 4 * WORDS, (3, 40, 8 * WORDS))
    indices = [memory.first_index(array) + index for array in arrays for index in range(4)]
    assert not mapped.may_end(indices) and not mapped.may_end([])
    for array in arrays:
        array[:] = ~np.int32(0)
        array[:, 0] &= ~np.int32(1 << 3)
        array[:, 1] &= ~np.int32(1 << 8)
        array[:, WORDS // 4] &= ~np.int32(1 << 8 * WORDS % 32)
    assert not mapped.may_end(indices), "all but the ends"
    for number, end in ((1, 3), (6, 40), (7, 8 * WORDS)):
        word = arrays[number // 4][number % 4]
        word[end // 32] |= np.int32(1 << end % 32)
        assert mapped.may_end(indices) and mapped.may_end([indices[number]])
        assert not mapped.may_end([index for index in indices if index != indices[number]])
        word[end // 32] &= ~np.int32(1 << end % 32)


def test_descriptors_end_with_the_memory() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    memory = MaskMemory()
    arrays = [memory.allocate(2, WORDS) for _ in range(3)]
    mapped = MappedMasks(memory.fds, 4 * WORDS)
    arrays[2][1] = 5
    del memory
    address = mapped.address((2 << 20) + 1)
    assert ctypes.c_int32.from_address(address).value == 5, "mappings outlast the descriptors"
    del mapped, arrays
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before
