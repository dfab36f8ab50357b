"""Copies of released memory."""

import os
import resource
import signal
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine_core.errors import SleepError
from tandem.engine_core.memory.backup import Backup, FileBackup, PinnedBackup

pinned: list[NDArray[np.int32]] = []


def pin(array: NDArray[np.int32]) -> bool:
    pinned.append(array)
    return True


BACKUPS = {"pinned": lambda: PinnedBackup(pin, lambda: None, lambda: 10_000), "file": FileBackup}


def bytes_of(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def check_round_trip(backup: Backup, tensors: Sequence[Tensor]) -> None:
    expected = [tensor.clone() for tensor in tensors]
    backup.save(tensors)
    for tensor in tensors:
        tensor.zero_()
    backup.load(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("kind", BACKUPS)
@pytest.mark.parametrize("reserved", [0, 1000, 9000])
def test_tensors_come_back(kind: str, reserved: int) -> None:
    backup = BACKUPS[kind]()
    if reserved:
        backup.reserve(reserved)
    for sizes in ((5,), (1, 7, 512, 3), (4000, 1), (2,)):
        check_round_trip(backup, bytes_of(*sizes))


def test_memory_is_pinned_once_and_kept() -> None:
    pinned.clear()
    backup = BACKUPS["pinned"]()
    backup.reserve(1001)
    for _ in range(3):
        check_round_trip(backup, bytes_of(1000, 1))
    assert [array.nbytes for array in pinned] == [1004]


def test_a_lack_of_main_memory_is_reported_with_both_numbers() -> None:
    backup = BACKUPS["pinned"]()
    with pytest.raises(SleepError, match=r"10001.* 10000") as caught:
        backup.save(bytes_of(10_001))
    assert caught.value.is_lack


def test_memory_that_cannot_be_allocated_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    backup = BACKUPS["pinned"]()

    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(np, "empty", lambda count, dtype: fail() if count else np.zeros(0, dtype))
    with pytest.raises(SleepError) as caught:
        backup.reserve(100)
    assert caught.value.is_lack


def test_a_full_disk_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SleepError) as caught:
        FileBackup().reserve(5)
    assert caught.value.is_lack


@pytest.mark.parametrize("reserved", [0, 1000])
def test_a_copy_that_fills_the_disk_gives_back_what_it_took(reserved: int) -> None:
    """A limit on the size of files takes the place of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    backup, tensors = FileBackup(), bytes_of(1000, 20_000)
    if reserved:
        backup.reserve(reserved)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(SleepError) as caught:
            backup.save(tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.is_lack
    assert os.fstat(backup._file.fileno()).st_size == reserved
    check_round_trip(backup, tensors)


def test_a_truncated_file_is_reported() -> None:
    backup, tensors = FileBackup(), bytes_of(100)
    backup.save(tensors)
    os.truncate(backup._file.fileno(), 50)
    with pytest.raises(SleepError):
        backup.load(tensors)
