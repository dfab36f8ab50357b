"""Main memory that is given back, and factories that are redirected into it."""

import ctypes
from mmap import PAGESIZE

import pytest
import torch

from tandem.engine_core.memory.device_memory import CACHE, WEIGHTS, AllocatedIn
from tandem.engine_core.memory.host_memory import HostMemory

CPU = torch.device("cpu")
SIZE = 2**25


def resident(address: int) -> int:
    """Return how many of SIZE bytes at an address are in main memory, 0 if nothing is mapped there."""
    pages = (ctypes.c_ubyte * (SIZE // PAGESIZE))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), pages):
        return 0
    return PAGESIZE * sum(page & 1 for page in pages)


def test_released_memory_leaves_the_process_and_tensors_keep_their_addresses() -> None:
    memory = HostMemory()
    tensor = memory.allocate(SIZE)
    assert not tensor.any()
    tensor.fill_(7)
    address = tensor.data_ptr()
    assert resident(address) > 0.9 * SIZE
    memory.release()
    assert resident(address) == 0
    memory.restore()
    assert tensor.data_ptr() == address == memory.tensors[0].data_ptr() and not tensor.any()
    tensor.fill_(5)
    assert memory.tensors[0].eq(5).all() and memory.num_bytes == SIZE


def test_memory_goes_with_its_tensors() -> None:
    memory = HostMemory()
    tensor = memory.allocate(SIZE).fill_(1)
    address = tensor.data_ptr()
    del memory
    assert resident(address) > 0.9 * SIZE and tensor.eq(1).all()
    del tensor
    assert resident(address) == 0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("shape", "given", "dtype"),
    [
        (((3, 5),), {}, torch.float32),
        ((3, 5), {"dtype": torch.bfloat16}, torch.bfloat16),
        (((7,),), {"dtype": torch.float8_e4m3fn}, torch.float8_e4m3fn),
        ((4,), {"dtype": torch.int32}, torch.int32),
        (((),), {"dtype": torch.int64}, torch.int64),
        ((torch.Size((2, 3)),), {"dtype": torch.uint8}, torch.uint8),
        (((0, 3),), {}, torch.float32),
    ],
)
def test_factories_take_their_memory_from_it(
    inference: bool, shape: tuple[object, ...], given: dict[str, torch.dtype], dtype: torch.dtype
) -> None:
    memory = HostMemory()
    with torch.inference_mode(inference), AllocatedIn(memory, CPU, CACHE):
        found = [factory(*shape, device=CPU, **given) for factory in (torch.empty, torch.zeros)]  # type: ignore[operator]
    expected = torch.zeros(*shape, dtype=dtype)  # type: ignore[call-overload]
    for tensor in found:
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (expected.shape, dtype, expected.stride())
        assert tensor.is_inference() == inference
    assert [tensor.data_ptr() for tensor in found if tensor.numel()] == [t.data_ptr() for t in memory.tensors]


def test_others_do_not() -> None:
    memory = HostMemory()
    with AllocatedIn(memory, CPU, WEIGHTS):
        torch.zeros(3, device=CPU)
        torch.empty(3)
        torch.empty(3, device="meta")
        torch.full((3,), 1.0, device=CPU)
        torch.arange(3, device=CPU)
    torch.empty(3, device=CPU)
    assert not memory.tensors


def test_allocations_of_the_device_by_name_are_redirected() -> None:
    memory = HostMemory()
    with AllocatedIn(memory, CPU, WEIGHTS):
        torch.empty(3, device="cpu")
    assert len(memory.tensors) == 1
