"""The tools for porting a model, on CUDA: tiny checkpoints against transformers, and a profile."""

from pathlib import Path

import pytest

from benchmarks import layer_diff, profile_generation, sanity_check
from benchmarks.porting.tiny import save_tiny
from benchmarks.porting.trace import operations, read_trace

pytestmark = pytest.mark.gpu
WIDE = {
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
"""Sizes that the kernels for CUDA take, and weights small enough that layers of that width do not amplify rounding."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("LlamaForCausalLM", tmp_path / "model", **WIDE)
    return tmp_path / "model"


def test_layers_agree_with_transformers_in_float32(folder: Path) -> None:
    reference = ["--device", "cuda", "--dtype", "bfloat16", "--reference-dtype", "float32"]
    assert layer_diff.main([str(folder), "transformers", *reference]) == 0


def test_a_checkpoint_gets_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanity_check.main([str(folder), "--device", "cuda", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith("ok   model")


def test_kernels_belong_to_operations(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--rows", "2", "--steps", "4", "--out", str(tmp_path / "out")]
    profile_generation.main(["--model", str(folder), *flags])
    output = capsys.readouterr().out
    assert "as served" in output, "the engine has graphs"
    assert (tmp_path / "out" / "steps.json.gz").is_file()
    totals = operations(read_trace(tmp_path / "out" / "operations.json.gz"))
    for operation in ("qkv", "rotary", "attention", "attention output", "mlp", "head", "sampling"):
        assert totals[operation].microseconds > 0, operation
    assert totals["mlp"].count >= 4 * 4, "each of four layers launches a kernel in each of four steps"
