"""Memory of tensors that can be released and restored, while the tensors keep their addresses."""

from collections.abc import Callable, Sequence
from math import prod
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WEIGHTS: tuple[Callable[..., Tensor], ...] = (torch.empty,)
"""Factories of weights. Tensors with initial contents, such as the memory of adapters, do not come from a checkpoint
and are not released."""
CACHE: tuple[Callable[..., Tensor], ...] = (torch.empty, torch.zeros)
"""Factories of the KV pool and of recurrent states."""


class DeviceMemory(Protocol):
    """A growing region of one device.

    Between `release` and `restore` no tensor of it may be read or written, not even by kernels that were launched
    before.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that it takes while it is not released."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All allocations in their order, uint8 each."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return `nbytes` bytes of zeros, uint8. Raises DeviceMemoryError."""

    def release(self) -> None:
        """Give the memory back to the device. Its contents are lost."""

    def restore(self) -> None:
        """Take memory from the device again, with zeros.

        Raises DeviceMemoryError if it has too little; then all of it is still released.
        """


class AllocatedIn(TorchFunctionMode):
    """Context in which torch's factories take tensors of one device from a `DeviceMemory`.

    Only calls on this thread that name the device are redirected.
    """

    def __init__(
        self, memory: DeviceMemory, device: torch.device, factories: Sequence[Callable[..., Tensor]] = WEIGHTS
    ) -> None:
        super().__init__()
        self._memory = memory
        self._device = device
        self._factories = frozenset(factories)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func not in self._factories or torch.device(given.get("device") or "meta") != self._device:
            return func(*args, **given)
        shape = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args
        dtype = given.get("dtype") or torch.get_default_dtype()
        nbytes = prod(shape) * dtype.itemsize
        return self._memory.allocate(nbytes).view(dtype).view(shape) if nbytes else func(*args, **given)
