"""Order and failures of the driver's calls, over a double of the driver."""

import gc

import pytest
import torch
from torch import Tensor

from tandem.engine_core.errors import DeviceMemoryError, FatalError
from tandem.engine_core.memory.cuda_memory import ALIGNMENT, MAX_PIECE, MIN_PIECE, CudaBytes, CudaMemory
from tests.fakes.cuda_driver import GRANULARITY, CUresult, FakeCudaDriver

OUT_OF_MEMORY, INVALID = CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_INVALID_VALUE
DEVICE = torch.device("cuda", 0)


class Viewed:
    """A stand-in for a CUDA tensor, which fails if it is written without memory behind it."""

    def __init__(self, driver: FakeCudaDriver, data: CudaBytes) -> None:
        self.driver = driver
        self.data = data
        self.address, self.nbytes = data.__cuda_array_interface__["data"][0], data.__cuda_array_interface__["shape"][0]

    def zero_(self) -> "Viewed":
        assert self.driver.is_usable(self.address, self.nbytes)
        return self


def new(driver: FakeCudaDriver, max_bytes: int = 2**35, device: torch.device = DEVICE) -> CudaMemory:
    def view(data: CudaBytes) -> Tensor:
        return Viewed(driver, data)  # type: ignore[return-value]

    return CudaMemory(driver, device, max_bytes, lambda: driver.calls.append("synchronize"), view)


def addresses(memory: CudaMemory) -> list[int]:
    return [tensor.address for tensor in memory.tensors]  # type: ignore[attr-defined]


def test_calls_come_in_the_order_of_the_driver() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    assert driver.calls == ["granularity", "reserve"]
    memory.allocate(100)
    assert driver.calls[2:] == ["create", "map", "access"]
    memory.release()
    assert driver.calls[5:] == ["synchronize", "unmap", "release"], "kernels that are enqueued still use the memory"
    memory.restore()
    assert driver.calls[8:] == ["create", "map", "access"]
    del memory
    gc.collect()
    assert driver.calls[11:] == ["synchronize", "unmap", "release", "free"]
    assert driver.is_clean


def test_small_tensors_share_a_piece_and_large_ones_are_cut() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    for _ in range(100):
        memory.allocate(1000)
    assert driver.calls.count("create") == 1 and memory.num_bytes == driver.used == MIN_PIECE
    memory.allocate(2 * MAX_PIECE)
    assert max(driver.created.values()) == MAX_PIECE
    assert memory.num_bytes == driver.used >= 2 * MAX_PIECE
    assert driver.calls.count("access") == 2


def test_tensors_are_aligned_and_disjoint_and_pieces_are_rounded() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    sizes = [1, 511, 512, 513, MIN_PIECE, 3, 5 * GRANULARITY + 1]
    for size in sizes:
        memory.allocate(size)
    found = addresses(memory)
    assert found[0] == memory.base and all(address % ALIGNMENT == 0 for address in found)
    for (start, size), after in zip(zip(found, sizes, strict=True), found[1:], strict=False):
        assert start + size <= after
    assert all(size % GRANULARITY == 0 for size in driver.created.values())
    assert all(driver.is_usable(address, size) for address, size in zip(found, sizes, strict=True))


def test_addresses_are_kept_and_all_bytes_are_released() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    for size in (10, MIN_PIECE, 3 * MAX_PIECE):
        memory.allocate(size)
    before, used = addresses(memory), driver.used
    for _ in range(3):
        memory.release()
        assert driver.used == 0 and memory.num_bytes == used
        assert not driver.is_usable(before[0], 1)
        memory.restore()
        assert driver.used == used and addresses(memory) == before


def test_releasing_twice_releases_once() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    memory.allocate(10)
    memory.release()
    memory.release()
    assert driver.calls.count("unmap") == driver.calls.count("release") == 1


@pytest.mark.parametrize("failing", ["create", "map"])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID])
def test_a_restore_that_fails_at_any_piece_restores_nothing_and_can_be_repeated(
    failing: str, number: int, code: int
) -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    memory.allocate(3 * MAX_PIECE + 5)
    used = driver.used
    memory.release()
    driver.faults[failing] = [0] * number + [code]
    with pytest.raises(DeviceMemoryError, match=CUresult(code).name):
        memory.restore()
    assert driver.used == 0 and not driver.mapped
    memory.restore()
    assert driver.used == used and driver.is_usable(memory.base, 3 * MAX_PIECE + 5)


def test_a_restore_without_access_restores_nothing() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    memory.allocate(10)
    memory.release()
    driver.faults["access"] = [INVALID]
    with pytest.raises(DeviceMemoryError):
        memory.restore()
    assert driver.used == 0 and not driver.mapped
    memory.restore()


@pytest.mark.parametrize("free", [0, MIN_PIECE - 1, 2 * MAX_PIECE])
def test_a_device_that_others_fill_meanwhile_leaves_all_released(free: int) -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    memory.allocate(3 * MAX_PIECE)
    memory.release()
    driver.total = free
    with pytest.raises(DeviceMemoryError):
        memory.restore()
    assert driver.used == 0
    driver.total = 2**34
    memory.restore()


@pytest.mark.parametrize("failing", ["create", "map", "access"])
def test_an_allocation_that_fails_takes_nothing(failing: str) -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    memory.allocate(10)
    used = driver.used
    driver.faults[failing] = [OUT_OF_MEMORY]
    with pytest.raises(DeviceMemoryError):
        memory.allocate(2 * MIN_PIECE)
    assert driver.used == used == memory.num_bytes and len(memory.tensors) == 1
    memory.allocate(2 * MIN_PIECE)
    memory.release()
    memory.restore()
    assert driver.used == memory.num_bytes


@pytest.mark.parametrize("failing", ["unmap", "release"])
def test_a_failure_to_release_is_fatal(failing: str) -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    memory.allocate(10)
    driver.faults[failing] = [INVALID]
    with pytest.raises(FatalError):
        memory.release()
    memory._mapping.handles.clear()  # The process ends; nothing is freed here either.
    driver.mapped.clear()


def test_the_range_has_a_limit_and_a_device() -> None:
    driver = FakeCudaDriver(device=3)
    memory = new(driver, 100, torch.device("cuda", 3))
    memory.allocate(GRANULARITY)
    with pytest.raises(DeviceMemoryError):
        memory.allocate(1)
    driver.faults["reserve"] = [OUT_OF_MEMORY]
    with pytest.raises(DeviceMemoryError, match="cuMemAddressReserve"):
        new(driver, 100, torch.device("cuda", 3))


def test_memory_lives_as_long_as_one_of_its_tensors() -> None:
    driver = FakeCudaDriver()
    memory = new(driver)
    tensor = memory.allocate(10)
    del memory
    gc.collect()
    assert driver.used and driver.reserved
    del tensor
    gc.collect()
    assert driver.is_clean


def test_memory_that_is_dropped_is_freed_at_once() -> None:
    """Freeing waits for the device: a later garbage collection could do so while a graph is captured."""
    driver = FakeCudaDriver()
    gc.disable()
    try:
        CudaMemory(driver, DEVICE, 2**30, lambda: driver.calls.append("synchronize"))
        assert driver.calls[-2:] == ["synchronize", "free"]
    finally:
        gc.enable()
