"""Virtual ranges of a GPU, whose physical memory comes and goes while tensors keep their addresses.

See "Virtual Memory Management" in the documentation of the CUDA driver: a range of addresses is reserved, physical
memory is created, mapped into the range and made accessible; kernels and captured graphs see addresses only.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from tandem.engine_core.errors import DeviceMemoryError, FatalError
from tandem.engine_core.integers import ceil_div

ALIGNMENT = 512
"""Alignment of tensors in bytes, as that of torch's allocator."""
MIN_PIECE, MAX_PIECE = 2**26, 2**30
"""Bytes of physical memory that is created at once: a range grows by pieces of at least the first, so that hundreds of
small tensors share few."""


@dataclass(slots=True)
class Mapping:
    """Physical memory in a range."""

    driver: Any
    device: int
    base: int
    reserved: int
    sizes: list[int] = field(default_factory=list)
    """Bytes of each piece, from the beginning of the range on; kept while they are released."""
    handles: list[Any] = field(default_factory=list)
    """Handle of each piece; none while they are released."""

    def extend(self, sizes: Sequence[int]) -> None:
        """Create and map further pieces, all or none. Raises DeviceMemoryError."""
        first = start = self.base + sum(self.sizes[: len(self.handles)])
        created: list[tuple[int, int, Any]] = []
        try:
            for size in sizes:
                (handle,) = self._call("cuMemCreate", size, self._properties(), 0)
                created.append((0, size, handle))
                self._call("cuMemMap", start, size, 0, handle, 0)
                created[-1] = start, size, handle
                start += size
            self._call("cuMemSetAccess", first, start - first, [self._access()], 1)
        except DeviceMemoryError:
            for address, size, handle in reversed(created):
                self._drop(address, size, handle)
            raise
        self.handles += [handle for _, _, handle in created]

    def release(self) -> None:
        """Unmap and release all pieces. Raises FatalError."""
        start = self.base
        for size, handle in zip(self.sizes, self.handles, strict=False):
            self._drop(start, size, handle)
            start += size
        self.handles.clear()

    def close(self) -> None:
        """Release all pieces and the addresses."""
        self.release()
        self._call("cuMemAddressFree", self.base, self.reserved)

    def _drop(self, address: int, size: int, handle: Any) -> None:
        """Unmap a piece, if it has an address, and release it."""
        try:
            if address:
                self._call("cuMemUnmap", address, size)
            self._call("cuMemRelease", handle)
        except DeviceMemoryError as error:
            raise FatalError(str(error)) from error

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        return call(self.driver, name, *args)

    def _properties(self) -> Any:
        return allocation_properties(self.driver, self.device)

    def _access(self) -> Any:
        driver, access = self.driver, self.driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


class CudaMemory:
    """Implement `DeviceMemory` by one range of addresses.

    The range is freed when neither this object nor one of its tensors is in use any more.
    """

    def __init__(
        self,
        driver: Any,
        device: torch.device,
        max_bytes: int,
        synchronize: Callable[[], None],
        view: Callable[["CudaBytes"], Tensor] | None = None,
    ) -> None:
        """Reserve a range of addresses, which takes no memory. Raises DeviceMemoryError.

        driver: `cuda.bindings.driver`; max_bytes: limit of all allocations; synchronize: waits for the device, before
        memory is released; view: returns a tensor over memory, None for a CUDA tensor.
        """
        self._device = device
        self._synchronize = synchronize
        self._view = view
        index = device.index or 0
        properties, flags = allocation_properties(driver, index), driver.CUmemAllocationGranularity_flags
        recommended = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        (granularity,) = call(driver, "cuMemGetAllocationGranularity", properties, recommended)
        self._granularity = int(granularity)
        reserved = self._rounded(max_bytes)
        (base,) = call(driver, "cuMemAddressReserve", reserved, self._granularity, 0, 0)
        self._mapping = Mapping(driver, index, int(base), reserved)
        self._parts: list[tuple[int, int]] = []
        """Offset and size of each allocation."""
        finalize(self, _close, self._mapping, synchronize).atexit = False

    @property
    def base(self) -> int:
        """First address of the range."""
        return self._mapping.base

    @property
    def num_bytes(self) -> int:
        return sum(self._mapping.sizes)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self._tensor(*part) for part in self._parts]

    def allocate(self, nbytes: int) -> Tensor:
        mapping = self._mapping
        used = sum(self._parts[-1]) if self._parts else 0
        start = ceil_div(used, ALIGNMENT) * ALIGNMENT
        lack = start + nbytes - self.num_bytes
        if start + nbytes > mapping.reserved:
            raise DeviceMemoryError(f"{start + nbytes} bytes exceed the range of {mapping.reserved}")
        if lack > 0:
            sizes = _pieces(min(self._rounded(max(lack, MIN_PIECE)), mapping.reserved - self.num_bytes))
            mapping.extend(sizes)
            mapping.sizes += sizes
        self._parts.append((start, nbytes))
        return self._tensor(start, nbytes).zero_()

    def release(self) -> None:
        # Unmapping does not wait for kernels that are enqueued.
        self._synchronize()
        self._mapping.release()

    def restore(self) -> None:
        self._mapping.extend(self._mapping.sizes)
        for tensor in self.tensors:
            tensor.zero_()

    def _rounded(self, nbytes: int) -> int:
        return ceil_div(nbytes, self._granularity) * self._granularity

    def _tensor(self, offset: int, nbytes: int) -> Tensor:
        data = CudaBytes(self.base + offset, nbytes, self)
        return torch.as_tensor(data, device=self._device) if self._view is None else self._view(data)


class CudaBytes:
    """Bytes of a GPU, as `torch.as_tensor` takes them: it keeps this object while the tensor is in use."""

    def __init__(self, address: int, nbytes: int, owner: CudaMemory) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 2}


def open_driver() -> Any:
    """Return the bindings of the CUDA driver, which torch's CUDA wheels bring. Raises ImportError."""
    return importlib.import_module("cuda.bindings.driver")


def allocation_properties(driver: Any, device: int) -> Any:
    """Return the properties of physical memory of a device."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def call(driver: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """Call a function of the driver; return its results. Raises DeviceMemoryError with the name of its error."""
    error, *found = getattr(driver, name)(*args)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceMemoryError(f"{name} failed: {getattr(error, 'name', error)}")
    return tuple(found)


def _pieces(nbytes: int) -> list[int]:
    full, rest = divmod(nbytes, MAX_PIECE)
    return [MAX_PIECE] * full + [rest] * (rest > 0)


def _close(mapping: Mapping, synchronize: Callable[[], None]) -> None:
    synchronize()
    mapping.close()
