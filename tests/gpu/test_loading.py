"""Weights on the GPU equal the file, and host memory holds only staging buffers."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.measuring.host_memory import PeakMemory
from tandem.engine_core.loader import transfer as transfers
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.slots import SourceSlice, WeightSlot
from tandem.engine_core.loader.transfer import transfer
from tests.engine_core.loader.test_transfer import FLOATS, random_tensors, save_sharded

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_equal_those_of_a_copy_on_the_host(
    dtype: torch.dtype, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 256)
    save_sharded(tmp_path, random_tensors(threads), 3)
    expected = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    plain = {name: torch.full_like(tensor, 7, dtype=dtype, device="cuda") for name, tensor in expected.items()}
    matrices = {name: tensor for name, tensor in expected.items() if tensor.ndim > 1}
    turned = {name: torch.full_like(tensor.mT, 7, dtype=dtype, device="cuda").mT for name, tensor in matrices.items()}
    slots = [WeightSlot.whole(name, parameter) for filled in (plain, turned) for name, parameter in filled.items()]
    transfer(slots, Checkpoint.open(tmp_path), threads=threads)
    for filled in (plain, turned):
        for name, parameter in filled.items():
            assert torch.equal(parameter, expected[name].cuda().to(dtype)), name


def test_small_tensors_of_several_dtypes_in_one_span_are_copied_or_cast(tmp_path: Path) -> None:
    tensors = random_tensors(5) | {f"e{number}": torch.full((7, 5), float(number)) for number in range(500)}
    save_file(tensors, tmp_path / "model.safetensors")
    same = {name: torch.full_like(tensor, 7, device="cuda") for name, tensor in tensors.items()}
    cast = {name: torch.full_like(tensor, 7, device="cuda", dtype=torch.float16) for name, tensor in tensors.items()}
    slots = [WeightSlot.whole(name, parameter) for filled in (same, cast) for name, parameter in filled.items()]
    transfer(slots, Checkpoint.open(tmp_path), threads=2)
    for name, tensor in tensors.items():
        assert torch.equal(same[name].cpu(), tensor), name
        assert torch.equal(cast[name], tensor.cuda().half()), name


def test_slices_and_transforms_are_filled_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 4096)
    whole = torch.randn(600, 500)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    fused = torch.empty(600, 500, device="cuda", dtype=torch.bfloat16)
    columns = torch.empty(600, 7, device="cuda")
    turned = torch.empty(250, 600, device="cuda", dtype=torch.float64)
    slots = [
        WeightSlot("w", fused, 0, 0, 400, SourceSlice((600, 500), 0, 200, 400)),
        WeightSlot("w", fused, 0, 400, 200, SourceSlice((600, 500), 0, 0, 200)),
        WeightSlot.whole("w", columns, SourceSlice((600, 500), 1, 40, 7)),
        WeightSlot.whole("w", turned, SourceSlice((600, 500), 1, 250), transform=torch.t),
    ]
    transfer(slots, Checkpoint.open(tmp_path))
    assert torch.equal(fused.cpu(), torch.cat((whole[200:], whole[:200])).bfloat16())
    assert torch.equal(columns.cpu(), whole[:, 40:47])
    assert torch.equal(turned.cpu(), whole[:, 250:].t().double())


def test_a_kernel_that_does_not_read_into_pinned_memory_gets_other_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 4096)
    preadv, refused = os.preadv, []

    def refuses_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not refused:
            refused.append(offset)
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuses_once)
    whole = torch.randn(600, 500)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    parameter = torch.empty(600, 500, device="cuda")
    transfer([WeightSlot.whole("w", parameter)], Checkpoint.open(tmp_path), threads=1)
    assert refused
    assert torch.equal(parameter.cpu(), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["as stored", "cast"])
def test_host_memory_holds_staging_buffers_and_no_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    """The checkpoint has 1 GiB in two tensors; the staging buffers of four threads have 128 MiB."""
    block = torch.randn(256 * MIB, device="cuda").bfloat16()
    stored = {name: block.cpu() for name in ("a", "b")}
    save_file(stored, tmp_path / "model.safetensors")
    del stored
    slots = [WeightSlot.whole(name, torch.zeros(256 * MIB, device="cuda", dtype=dtype)) for name in ("a", "b")]
    with PeakMemory() as memory:
        transfer(slots, Checkpoint.open(tmp_path), threads=4)
    for slot in slots:
        assert torch.equal(slot.target, block.to(dtype))
    print(f"\n{memory.growth / MIB:.0f} MiB above {memory.idle / MIB:.0f} MiB")
    assert memory.growth < 300 * MIB
