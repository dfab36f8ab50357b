"""Virtual memory management of the CUDA driver, as `cuda.bindings.driver` has it, which checks the order of calls."""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULARITY = 2**21
BASE = 2**40


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeCudaDriver:
    """Device memory of `total` bytes. Calls against the rules of the driver fail an assertion."""

    CUresult = CUresult
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, total: int = 2**34, device: int = 0) -> None:
        self.total = total
        self.device = device
        self.calls: list[str] = []
        self.faults: dict[str, list[int]] = {}
        """Errors of the next calls of a function, 0 for none."""
        self.reserved: dict[int, int] = {}
        """Bytes of each range of addresses."""
        self.created: dict[int, int] = {}
        """Bytes of each handle that is not released."""
        self.mapped: dict[int, tuple[int, int]] = {}
        """Bytes and handle of each mapped address."""
        self.accessible: set[int] = set()
        """Mapped addresses that may be read and written."""
        self._next_handle = 1
        self._next_base = BASE

    @property
    def used(self) -> int:
        return sum(self.created.values())

    @property
    def is_clean(self) -> bool:
        return not (self.reserved or self.created or self.mapped or self.accessible)

    @staticmethod
    def CUmemAllocationProp() -> Any:  # noqa: N802
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    @staticmethod
    def CUmemAccessDesc() -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace(type=0, id=-1), flags=0)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[Any, ...]:  # noqa: N802
        self._check_location(properties.location)
        return self._end("granularity", GRANULARITY)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert size > 0 and size % GRANULARITY == 0 and alignment % GRANULARITY == 0 and address == flags == 0
        if error := self._fault("reserve"):
            return error, 0
        base, self._next_base = self._next_base, self._next_base + size + GRANULARITY
        self.reserved[base] = size
        return self._end("reserve", base)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert size > 0 and size % GRANULARITY == 0 and flags == 0 and properties.type == 1
        self._check_location(properties.location)
        if error := self._fault("create"):
            return error, 0
        if self.used + size > self.total:
            self.calls.append("create")
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.created[handle] = size
        return self._end("create", handle)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.created[handle] == size and offset == flags == 0
        assert self._range_of(address, size) is not None, "mapped outside a range"
        assert all(address + size <= start or address >= start + used for start, (used, _) in self.mapped.items())
        assert handle not in [known for _, known in self.mapped.values()], "mapped twice"
        if error := self._fault("map"):
            return (error,)
        self.mapped[address] = size, handle
        return self._end("map")

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:  # noqa: N802
        assert count == len(access) == 1 and access[0].flags == 3
        self._check_location(access[0].location)
        if error := self._fault("access"):
            return (error,)
        position = address
        while position < address + size:
            self.accessible.add(position)
            position += self.mapped[position][0]
        assert position == address + size
        return self._end("access")

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.mapped[address][0] == size, "unmapped what is not mapped so"
        if error := self._fault("unmap"):
            return (error,)
        del self.mapped[address]
        self.accessible.discard(address)
        return self._end("unmap")

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        assert handle in self.created, "released twice"
        assert handle not in [known for _, known in self.mapped.values()], "released while mapped: nothing gets free"
        if error := self._fault("release"):
            return (error,)
        del self.created[handle]
        return self._end("release")

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.reserved[address] == size
        assert not [start for start in self.mapped if address <= start < address + size], "freed while mapped"
        del self.reserved[address]
        return self._end("free")

    def is_usable(self, address: int, size: int) -> bool:
        """Return whether bytes may be read and written."""
        end = address + size
        while address < end:
            start = max((start for start in self.accessible if start <= address), default=-1)
            if start < 0 or start + self.mapped[start][0] <= address:
                return False
            address = start + self.mapped[start][0]
        return True

    def _check_location(self, location: Any) -> None:
        assert location.type == 1 and location.id == self.device

    def _range_of(self, address: int, size: int) -> int | None:
        ranges = self.reserved.items()
        return next((base for base, all_ in ranges if base <= address and address + size <= base + all_), None)

    def _fault(self, name: str) -> CUresult | None:
        code = self.faults[name].pop(0) if self.faults.get(name) else 0
        if code:
            self.calls.append(name)
        return CUresult(code) if code else None

    def _end(self, name: str, *results: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        return CUresult.CUDA_SUCCESS, *results
