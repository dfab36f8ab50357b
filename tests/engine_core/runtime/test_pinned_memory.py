"""Host memory that CUDA pins, against a fake of its calls."""

import gc

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tandem.engine_core.runtime.device import CpuDevice, CudaDevice, Device
from tandem.engine_core.runtime.slots import StepSlot
from tests.fakes.constraint import FakeFiller
from tests.support.tiny_llama import CONFIG, TorchPlanner

ROWS, WORDS = 4, 3


class FakeCudart:
    """The two calls that pin and unpin memory."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}
        """Bytes by address."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address not in self.pinned, "memory that was unmapped while it was pinned"
        if self.code == 0:
            self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture(params=[0, 712], ids=["pinned", "refused"])
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return (fake := FakeCudart(request.param))


@pytest.fixture
def device() -> CudaDevice:
    built = CudaDevice.__new__(CudaDevice)  # whose streams need a GPU
    built.torch_device = torch.device("cpu")
    return built


def test_memory_is_unpinned_before_it_is_unmapped(cudart: FakeCudart, device: CudaDevice) -> None:
    memory = np.zeros((ROWS, WORDS), dtype=np.int32)
    size = memory.nbytes
    assert device.pin(memory) == (cudart.code == 0)
    tensor = torch.from_numpy(memory)
    del memory
    gc.collect()
    assert list(cudart.pinned.values()) == [size] * (cudart.code == 0), "the tensor still uses it"
    del tensor
    gc.collect()
    assert not cudart.pinned


class SharingFiller(FakeFiller):
    """Filler whose memory others could map."""

    def __init__(self) -> None:
        self.given: list[NDArray[np.int32]] = []

    def allocate(self, rows: int, words: int) -> NDArray[np.int32]:
        self.given.append(np.zeros((rows, words), dtype=np.int32))
        return self.given[-1]


class RefusingDevice(CpuDevice):
    """CPU that pins nothing."""

    def pin(self, memory: NDArray[np.int32]) -> bool:
        return False


@pytest.mark.parametrize(("device", "is_shared"), [(CpuDevice(), True), (RefusingDevice(), False)])
def test_ids_are_shared_only_in_pinned_memory(device: Device, is_shared: bool) -> None:
    """The loop would wait for copies to other memory; those of masks only take longer."""
    filler = SharingFiller()
    slot = StepSlot.allocate(device, 64, ROWS, 16, 32 * WORDS, TorchPlanner(CONFIG.attention_kinds), filler)
    masks, ids = filler.given
    assert (masks.shape, ids.shape) == ((ROWS, WORDS), (1, ROWS))
    slot.masks_view[:], slot.results_view[:] = 5, 7
    assert (masks == 5).all() and (ids == 7).all() == is_shared
    assert slot.results.tolist() == [7] * ROWS
