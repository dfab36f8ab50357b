"""Main memory that is given back to the operating system while tensors keep their addresses."""

from collections.abc import Sequence
from mmap import MADV_DONTNEED, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from tandem.engine_core.errors import DeviceMemoryError


class HostMemory:
    """Implement `DeviceMemory` on a CPU: each allocation is an anonymous mapping.

    The kernel fills pages with zeros at their first use, also after `release`.
    """

    def __init__(self) -> None:
        self._maps: list[mmap] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._maps))

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in self._maps]

    def allocate(self, nbytes: int) -> Tensor:
        try:
            self._maps.append(mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS))
        except OSError as error:
            raise DeviceMemoryError(f"{nbytes} bytes cannot be allocated: {error}") from error
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)

    def release(self) -> None:
        for mapped in self._maps:
            mapped.madvise(MADV_DONTNEED)

    def restore(self) -> None:
        """Do nothing: pages come back when they are used."""
