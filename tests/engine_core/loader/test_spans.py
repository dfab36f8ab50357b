"""Spans hold each piece once, in the order of the files, and are never larger than a buffer."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.filling import Filling, Job, bytes_of, spans
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.source_file import SourceFile
from tandem.engine_core.loader.transfer import transfer
from tests.support.safetensors_files import entry, file_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def jobs_of(directory: Path, parameters: dict[str, Tensor], nbytes: int) -> list[Job]:
    checkpoint = Checkpoint.open(directory)
    files: dict[Path, SourceFile] = {}
    jobs = []
    for name, parameter in parameters.items():
        stored = checkpoint.tensors[name]
        file = files.setdefault(stored.path, SourceFile(stored.path))
        slot = WeightSlot.whole(name, parameter, dtypes=(stored.dtype,))
        jobs += Filling(slot, stored, file, bytes_of(parameter)).jobs(nbytes)
    return jobs


@pytest.mark.parametrize("nbytes", [64, 4096, 2**20])
@pytest.mark.parametrize("seed", range(4))
def test_spans_are_adjacent_pieces_that_fit_a_buffer(seed: int, nbytes: int, tmp_path: Path) -> None:
    rng = Random(seed)
    tensors = {
        f"t{number}": torch.zeros(rng.randint(1, 9), rng.randint(1, 300)).to(rng.choice(DTYPES)) for number in range(60)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    jobs = jobs_of(tmp_path, tensors, nbytes)
    rng.shuffle(jobs)
    found = list(spans(jobs, nbytes))
    assert sorted(id(job) for span in found for job in span.jobs) == sorted(map(id, jobs))
    for span in found:
        reached = span.start
        for job in span.jobs:
            assert job.start == reached
            assert (job.start - span.start) % job.filling.dtype.itemsize == 0
            reached += job.nbytes
        assert reached - span.start == span.nbytes <= nbytes
    # Two that fit together are never apart.
    for one, other in pairwise(found):
        apart = one.start + one.nbytes != other.start or one.nbytes + other.jobs[0].nbytes > nbytes
        assert apart or (other.start - one.start) % other.jobs[0].filling.dtype.itemsize
    assert [span.start for span in found] == sorted(span.start for span in found)


def test_thousands_of_small_tensors_are_few_spans(tmp_path: Path) -> None:
    tensors = {f"e{number}": torch.full((4, 8), float(number)) for number in range(3000)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert len(list(spans(jobs_of(tmp_path, tensors, 2**24), 2**24))) == 1
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    transfer([WeightSlot.whole(name, parameter) for name, parameter in loaded.items()], Checkpoint.open(tmp_path))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_span_ends_with_its_file(tmp_path: Path) -> None:
    for number in range(2):
        save_file({f"t{number}": torch.zeros(8)}, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {f"t{number}": f"model-{number}.safetensors" for number in range(2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    parameters = {name: torch.zeros(8) for name in ("t0", "t1")}
    assert [len(span.jobs) for span in spans(jobs_of(tmp_path, parameters, 4096), 4096)] == [1, 1]


def test_a_tensor_at_an_odd_byte_begins_a_span(tmp_path: Path) -> None:
    entries = {"a": entry("U8", [3], 0, 3), "b": entry("F32", [2], 3, 11), "c": entry("F32", [1], 11, 15)}
    (tmp_path / "model.safetensors").write_bytes(file_bytes(entries, 15))
    parameters = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2), "c": torch.zeros(1)}
    assert [len(span.jobs) for span in spans(jobs_of(tmp_path, parameters, 4096), 4096)] == [1, 2]


def test_a_tensor_of_two_slots_is_read_for_each(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0), "x": torch.arange(3.0)}, tmp_path / "model.safetensors")
    parameters = [torch.zeros(6), torch.zeros(6), torch.zeros(3)]
    slots = [WeightSlot.whole(name, parameter) for name, parameter in zip(("w", "w", "x"), parameters, strict=True)]
    transfer(slots, Checkpoint.open(tmp_path), threads=1)
    expected = load_file(tmp_path / "model.safetensors")
    assert torch.equal(parameters[0], expected["w"]) and torch.equal(parameters[1], expected["w"])
    assert torch.equal(parameters[2], expected["x"])
