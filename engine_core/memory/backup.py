"""Copies of released memory on the host."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Protocol
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine_core.errors import SleepError


class Backup(Protocol):
    """Room for one copy of some tensors, which is kept for the next one."""

    def reserve(self, nbytes: int) -> None:
        """Make room for a copy. Raises SleepError."""

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of bytes. Raises SleepError."""

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy back into tensors of the same sizes. Raises SleepError."""


class PinnedBackup:
    """Implement `Backup` by pinned memory, which a GPU reads and writes at the speed of its link."""

    def __init__(
        self,
        pin: Callable[[NDArray[np.int32]], bool],
        synchronize: Callable[[], None],
        free_bytes: Callable[[], int],
    ) -> None:
        """pin: pins memory while the array is in use; synchronize: waits for the GPU; free_bytes: of the host."""
        self._pin = pin
        self._synchronize = synchronize
        self._free_bytes = free_bytes
        self._array: NDArray[np.int32] = np.empty(0, np.int32)

    def reserve(self, nbytes: int) -> None:
        if nbytes <= self._array.nbytes:
            return
        self._array = np.empty(0, np.int32)
        free = self._free_bytes()
        if nbytes > free:
            raise SleepError(
                f"a copy of the weights takes {nbytes} bytes of main memory, {free} are free", is_lack=True
            )
        try:
            self._array = np.empty(-(-nbytes // 4), np.int32)
        except MemoryError as error:
            raise SleepError(
                f"a copy of the weights takes {nbytes} bytes of main memory: {error}", is_lack=True
            ) from None
        self._pin(self._array)

    def save(self, tensors: Sequence[Tensor]) -> None:
        self.reserve(sum(map(len, tensors)))
        for part, tensor in self._parts(tensors):
            part.copy_(tensor, non_blocking=True)
        self._synchronize()

    def load(self, tensors: Sequence[Tensor]) -> None:
        for part, tensor in self._parts(tensors):
            tensor.copy_(part, non_blocking=True)
        self._synchronize()

    def _parts(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        room = torch.from_numpy(self._array).view(torch.uint8)
        ends = list(accumulate(map(len, tensors), initial=0))
        return [(room[start:end], tensor) for (start, end), tensor in zip(pairwise(ends), tensors, strict=True)]


class FileBackup:
    """Implement `Backup` by a temporary file, for weights in main memory: another copy there would free nothing."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tandem-sleep-", buffering=0)  # noqa: SIM115
        self._reserved = 0
        """Bytes of the file that stay allocated."""
        finalize(self, self._file.close)

    def reserve(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            self._shrink()
            raise self._problem(nbytes, error) from error
        self._reserved = max(self._reserved, nbytes)

    def save(self, tensors: Sequence[Tensor]) -> None:
        try:
            self._file.seek(0)
            for tensor in tensors:
                left = _bytes(tensor)
                while left:
                    left = left[self._file.write(left) :]
        except OSError as error:
            self._shrink()
            raise self._problem(sum(map(len, tensors)), error) from error
        with suppress(OSError):  # Pages that are not written out yet stay, which costs memory only.
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def load(self, tensors: Sequence[Tensor]) -> None:
        self._file.seek(0)
        for tensor in tensors:
            left = _bytes(tensor)
            while left:
                if not (count := self._file.readinto(left)):
                    raise SleepError("the temporary file of the weights is too short")
                left = left[count:]

    def _shrink(self) -> None:
        """Give back what a copy that has failed takes of the disk, which it may have filled."""
        with suppress(OSError):
            self._file.truncate(self._reserved)

    def _problem(self, nbytes: int, error: OSError) -> SleepError:
        return SleepError(
            f"a copy of {nbytes} bytes cannot be written to {tempfile.gettempdir()}: {error}", is_lack=True
        )


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
