"""Slots fill parameters from fused, split, transposed and packed checkpoints, reading no more than they need."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.slots import SourceSlice, WeightSlot
from tandem.engine_core.loader.weights import load_weights


class Slotted:
    """A model that is nothing but its slots."""

    def __init__(self, *slots: WeightSlot) -> None:
        self.slots = list(slots)

    def weight_slots(self) -> list[WeightSlot]:
        return self.slots


def fill(directory: Path, tensors: dict[str, Tensor], *slots: WeightSlot) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    load_weights(Slotted(*slots), Checkpoint.open(directory))


def test_a_fused_tensor_fills_split_parameters(tmp_path: Path) -> None:
    fused = torch.randn(10, 4)
    first, second = torch.empty(6, 4), torch.empty(4, 4)
    fill(
        tmp_path,
        {"qk": fused},
        WeightSlot.whole("qk", first, SourceSlice((10, 4), 0, 0, 6)),
        WeightSlot.whole("qk", second, SourceSlice((10, 4), 0, 6, 4)),
    )
    assert torch.equal(torch.cat((first, second)), fused)


def test_split_tensors_fill_a_fused_parameter_along_its_second_dimension(tmp_path: Path) -> None:
    fused = torch.empty(4, 10)
    parts = {"a": torch.randn(4, 3), "b": torch.randn(4, 7)}
    fill(tmp_path, parts, WeightSlot("a", fused, 1, 0, 3), WeightSlot("b", fused, 1, 3, 7))
    assert torch.equal(fused, torch.cat((parts["a"], parts["b"]), 1))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_reads_its_slice_of_either_dimension(dim: int, tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    shard = torch.empty_like(whole.narrow(dim, 2, 3))
    fill(tmp_path, {"w": whole}, WeightSlot.whole("w", shard, SourceSlice((8, 6), dim, 2, 3)))
    assert torch.equal(shard, whole.narrow(dim, 2, 3))


def test_only_the_slice_is_read_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    preadv = os.preadv

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", recorded)
    whole, shard = torch.randn(8, 6), torch.empty(2, 6)
    fill(tmp_path, {"w": whole}, WeightSlot.whole("w", shard, SourceSlice((8, 6), 0, 4, 2)))
    assert torch.equal(shard, whole[4:6])
    assert sum(read) == 2 * 6 * 4


def test_a_transposed_tensor_is_transformed(tmp_path: Path) -> None:
    stored, parameter = torch.randn(5, 3), torch.empty(3, 5)
    fill(tmp_path, {"w": stored}, WeightSlot.whole("w", parameter, SourceSlice((5, 3)), transform=torch.t))
    assert torch.equal(parameter, stored.t())


def unpack(words: Tensor) -> Tensor:
    """Unpack eight 4-bit numbers from each int32, [rows / 8, columns] to [rows, columns], as GPTQ packs them."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None]
    return ((words[:, None, :] >> shifts) & 15).flatten(0, 1)


def test_packed_integers_are_sliced_then_unpacked(tmp_path: Path) -> None:
    numbers = torch.randint(0, 16, (32, 6))
    words = torch.zeros(4, 6, dtype=torch.int64)
    for index in range(8):
        words |= numbers.view(4, 8, 6)[:, index] << (4 * index)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    parameter = torch.empty(16, 6, dtype=torch.uint8)
    source = SourceSlice((4, 6), 0, 2, 2)
    fill(tmp_path, {"w": packed}, WeightSlot.whole("w", parameter, source, unpack, ("I32",)))
    assert torch.equal(parameter.long(), numbers[16:])


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (torch.zeros(4, 5), r"misshaped w\b.*\[4, 6\].*\[4, 5\]"),
        (torch.zeros(4, 6), r"unreadable w\b.* F32.* I32\b"),
    ],
)
def test_shape_and_dtype_of_the_whole_source_are_checked(stored: Tensor, text: str, tmp_path: Path) -> None:
    slot = WeightSlot.whole("w", torch.empty(2, 6), SourceSlice((4, 6), 0, 0, 2), dtypes=("I32",))
    with pytest.raises(ConfigError, match=text):
        fill(tmp_path, {"w": stored}, slot)


def test_a_region_along_the_second_dimension_may_not_stay_uncovered_or_be_given_twice(tmp_path: Path) -> None:
    fused = torch.empty(4, 10)
    slots = (WeightSlot("a", fused, 1, 0, 3), WeightSlot("b", fused, 1, 3, 7), WeightSlot("ab", fused, 1, 0, 10))
    with pytest.raises(ConfigError, match=r"missing b\b.*\[4, 7\]"):
        fill(tmp_path, {"a": torch.zeros(4, 3)}, *slots)
    with pytest.raises(ConfigError, match=r"twice: (b and ab|ab and b)"):
        fill(tmp_path, {"b": torch.zeros(4, 7), "ab": torch.zeros(4, 10)}, *slots)


def test_a_slice_of_another_shape_than_its_region_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    first, second = torch.zeros(3), torch.zeros(3, 6)
    slots = (WeightSlot.whole("n", first), WeightSlot.whole("w", second, SourceSlice((8, 6), 0, 4, 2)))
    with pytest.raises(ConfigError, match=r"^w: .*\[2, 6\] .*\[3, 6\]"):
        fill(tmp_path, {"n": torch.ones(3), "w": torch.randn(8, 6)}, *slots)
    assert not first.any() and not second.any()


def test_a_transform_of_another_shape_than_its_region_is_refused(tmp_path: Path) -> None:
    slot = WeightSlot.whole("w", torch.empty(5, 3), transform=torch.t)
    with pytest.raises(ConfigError, match=r"^w: .*\[3, 5\] .*\[5, 3\]"):
        fill(tmp_path, {"w": torch.randn(5, 3)}, slot)
