"""Tensors arrive as safetensors reads them, in any dtype, layout and number of threads, or with the file named."""

import errno
import json
import mmap
import os
import threading
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader import checkpoint as checkpoints
from tandem.engine_core.loader import copiers as copier_module
from tandem.engine_core.loader import transfer as transfers
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.slots import SourceSlice, WeightSlot
from tandem.engine_core.loader.source_file import BufferAddressError, SourceFile
from tandem.engine_core.loader.transfer import transfer
from tests.support.safetensors_files import entry, file_bytes

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def save_sharded(directory: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """Write tensors to `shards` files with an index."""
    weight_map = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, held in weight_map.items() if held == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_tensors(seed: int) -> dict[str, Tensor]:
    """Make tensors of random shapes in all floating-point dtypes."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    shapes = [tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3))) for _ in range(12)]
    return {
        f"t{number}": torch.randn(shape, generator=generator).to(FLOATS[number % len(FLOATS)])
        for number, shape in enumerate([*shapes, (0, 3)])
    }


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 256)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threads", [1, 3])
def test_sharded_tensors_equal_those_of_the_library(dtype: torch.dtype, threads: int, tmp_path: Path) -> None:
    save_sharded(tmp_path, random_tensors(threads), 3)
    expected = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    plain = {name: torch.full_like(tensor, 7, dtype=dtype) for name, tensor in expected.items()}
    turned = {
        name: torch.full_like(tensor.mT, 7, dtype=dtype).mT for name, tensor in expected.items() if tensor.ndim > 1
    }
    slots = [WeightSlot.whole(name, parameter) for filled in (plain, turned) for name, parameter in filled.items()]
    transfer(slots, Checkpoint.open(tmp_path), threads=threads)
    assert len(plain) == 13 and len(turned) > 4
    for filled in (plain, turned):
        for name, parameter in filled.items():
            assert torch.equal(parameter, expected[name].to(dtype)), name


@pytest.mark.usefixtures("small_pieces")
def test_slices_and_transforms_of_one_tensor_are_filled_by_several_threads(tmp_path: Path) -> None:
    whole = torch.randn(60, 50)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    rows, columns, turned = torch.empty(20, 50), torch.empty(60, 7), torch.empty(25, 60, dtype=torch.float64)
    slots = [
        WeightSlot.whole("w", rows, SourceSlice((60, 50), 0, 11, 20)),
        WeightSlot.whole("w", columns, SourceSlice((60, 50), 1, 40, 7)),
        WeightSlot.whole("w", turned, SourceSlice((60, 50), 1, 25), transform=torch.t),
    ]
    transfer(slots, Checkpoint.open(tmp_path), threads=4)
    assert torch.equal(rows, whole[11:31])
    assert torch.equal(columns, whole[:, 40:47])
    assert torch.equal(turned, whole[:, 25:].t().double())


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 6), (16, 16), (64, 16)])
def test_one_thread_per_core_reads_up_to_sixteen(
    cores: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    monkeypatch.setattr(transfers, "PIECE_BYTES", 64)
    copiers: list[int] = []

    def copier(_device: torch.device, nbytes: int) -> copier_module.HostCopier:
        copiers.append(nbytes)
        return copier_module.HostCopier(nbytes)

    monkeypatch.setattr(transfers, "_copier", copier)
    checkpoint, slots = opened(tmp_path)
    transfer(slots, checkpoint)
    assert len(copiers) == threads


def test_pinned_buffers_of_all_threads_stay_below_one_gibibyte() -> None:
    assert transfers.MAX_THREADS * copier_module.STAGING_BUFFERS * transfers.PIECE_BYTES <= 2**30


@pytest.mark.usefixtures("small_pieces")
def test_progress_counts_every_byte_once_and_in_order(tmp_path: Path) -> None:
    tensors = random_tensors(9)
    save_sharded(tmp_path, tensors, 2)
    seen: list[tuple[int, int]] = []
    slots = [WeightSlot.whole(name, torch.empty_like(tensor)) for name, tensor in tensors.items()]
    transfer(slots, Checkpoint.open(tmp_path), lambda done, total: seen.append((done, total)), threads=3)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert {count for _, count in seen} == {total}


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    content = bytearray(file_bytes({"a": entry("U8", [3], 0, 3), "b": entry("F32", [2], 3, 11)}, 11))
    content[-8:] = torch.tensor([1.5, -2.5]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    wide, same = torch.empty(2, dtype=torch.float64), torch.empty(2)
    transfer([WeightSlot.whole("b", wide), WeightSlot.whole("b", same)], Checkpoint.open(tmp_path))
    assert wide.tolist() == same.tolist() == [1.5, -2.5]


def opened(directory: Path) -> tuple[Checkpoint, list[WeightSlot]]:
    """Write a checkpoint of several pieces; return it and its slots."""
    save_file({"w": torch.randn(100, 50)}, directory / "model.safetensors")
    return Checkpoint.open(directory), [WeightSlot.whole("w", torch.empty(100, 50))]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_is_truncated_after_it_was_opened_is_named(threads: int, tmp_path: Path) -> None:
    checkpoint, slots = opened(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 9999)
    with pytest.raises(ConfigError, match=r"/model\.safetensors .*\b9999\b.*truncated"):
        transfer(slots, checkpoint, threads=threads)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    checkpoint, slots = opened(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"/model\.safetensors .*{os.strerror(errno.ENOENT)}"):
        transfer(slots, checkpoint)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_read_error_names_file_and_byte_and_ends_all_threads(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, slots = opened(tmp_path)
    preadv, before = os.preadv, set(threading.enumerate())

    def fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 9000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ConfigError, match=rf"/model\.safetensors .*\bbyte \d+: {os.strerror(errno.EIO)}"):
        transfer(slots, checkpoint, threads=threads)
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile


def test_memory_that_the_kernel_does_not_read_into_is_distinguished_from_a_broken_file(tmp_path: Path) -> None:
    """The page of a mapping beyond the end of its file has no memory."""
    opened(tmp_path)
    (tmp_path / "short").write_bytes(b"x" * mmap.PAGESIZE)
    with (tmp_path / "short").open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
        os.truncate(tmp_path / "short", 0)
        buffer = memoryview(mapped)
        with (
            SourceFile(tmp_path / "model.safetensors") as source,
            pytest.raises(BufferAddressError, match="Bad address"),
        ):
            source.read_into(buffer, 0)
        buffer.release()


@pytest.mark.usefixtures("small_pieces")
def test_reads_that_return_less_than_asked_for_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, slots = opened(tmp_path)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:37]], offset))
    transfer(slots, checkpoint)
    assert torch.equal(slots[0].target, load_file(tmp_path / "model.safetensors")["w"])


@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_ends_all_threads(tmp_path: Path) -> None:
    checkpoint, slots = opened(tmp_path)
    before = set(threading.enumerate())

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    torch_threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        transfer(slots, checkpoint, interrupt, threads=3)
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile
    assert torch.get_num_threads() == torch_threads


@pytest.mark.parametrize(("place", "differ"), [(0, True), (4999, True), (None, False)])
def test_tensors_are_compared_to_the_last_element(
    place: int | None, differ: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "COMPARED_ELEMENTS", 512)
    first = torch.randn(5000)
    second = first.clone()
    if place is not None:
        second[place] += 1
    save_file({"a": first, "b": second, "c": first.clone().view(50, 100)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors_differ("a", "b") == differ
    assert checkpoint.tensors_differ("a", "c")
    assert not checkpoint.tensors_differ("a", "gone")


def test_a_pair_of_tensors_is_compared_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5), "b": torch.ones(5), "c": torch.zeros(5)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.tensors_differ("a", "b")
    (tmp_path / "model.safetensors").unlink()
    assert not checkpoint.tensors_differ("a", "b")
    with pytest.raises(ConfigError, match=rf"/model\.safetensors .*{os.strerror(errno.ENOENT)}"):
        checkpoint.tensors_differ("a", "c")
