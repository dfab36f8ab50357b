"""The benchmark's checkpoint loads as any other, and its figures come from real runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.bench_loading import line, measure_library, measure_loads, read_bandwidth
from benchmarks.measuring.host_memory import PeakMemory
from benchmarks.shapes.make_checkpoint import write_checkpoint
from tandem.engine_core.loader.checkpoint import Checkpoint

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def shape(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS | {"tie_word_embeddings": request.param}))
    return folder


def test_a_checkpoint_of_noise_has_the_published_tensors(shape: Path, tmp_path: Path) -> None:
    size = write_checkpoint(shape, tmp_path / "out", shard_bytes=50_000)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert size == sum(path.stat().st_size for path in files)
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert set(tensors) == set(Checkpoint.open(tmp_path / "out").tensors)
    head = 0 if json.loads((shape / "config.json").read_text())["tie_word_embeddings"] else 1
    assert len(tensors) == 2 + head + 2 * 9
    assert not any("qkv_proj" in name or "gate_up_proj" in name for name in tensors)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert 0.015 < tensor.float().std() < 0.025


def test_loads_and_reads_are_measured(shape: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    size = write_checkpoint(shape, folder)
    assert read_bandwidth([folder / "model.safetensors"], 2) > 0
    loads = measure_loads(folder, "cpu", "float32", [1, 2])
    assert set(loads["seconds_by_threads"]) == {"1", "2"}
    assert loads["memory_growth"] >= 0
    library = measure_library(folder, "cpu", "float32")
    assert "x ceiling" in line(loads, size, 1.0) and "x ceiling" in line(library, size, 1.0)


def test_peak_memory_counts_what_is_touched() -> None:
    with PeakMemory() as memory:
        kept = bytearray(b"x") * 2**26
    assert memory.growth > 2**25
    assert len(kept) == 2**26
