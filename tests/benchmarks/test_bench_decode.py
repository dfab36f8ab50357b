"""Figures that the decode benchmark computes from its measurements."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import bench_decode
from benchmarks.bench_decode import Bench, Bounds, figures_of
from benchmarks.plot_decode import series
from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.stats import STAGES

BOUNDS = Bounds(floor=0.5, linears=0.8, accepted=1.1)
SECONDS = {f"stage {name}": 0.0001 for name in STAGES} | {"step": 0.002, "gpu": 0.0018, "idle": 0.0002, "alone": 0.0015}


def test_figures_are_computed_from_measured_times() -> None:
    found = figures_of(8, "pipelined", SECONDS, BOUNDS, blocking=2.5)
    assert found.step == pytest.approx(2.0)
    assert found.tokens_per_second == pytest.approx(4000)
    assert found.gpu_idle_percent == pytest.approx(25)
    assert found.gap_percent == pytest.approx(10)
    assert found.over_slower == pytest.approx(2.0 / 1.5)
    assert found.cpu == pytest.approx(0.1 * (len(STAGES) - 1)), "waiting for the device is no work"
    assert found.gain == pytest.approx(0.25)
    assert found.gain_ideal == pytest.approx((0.6 + 1.5) / 1.5 - 1)
    assert figures_of(8, "blocking", SECONDS, BOUNDS, blocking=None).gain is None


def test_plot_series_contains_one_mode() -> None:
    steps = [{"rows": rows, "mode": mode, "step": rows * 1.5} for rows in (1, 8) for mode in ("blocking", "pipelined")]
    assert series(steps, "pipelined", "step") == ([1, 8], [1.5, 12.0])


EXPERTS, TOP_K = 33, 8
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("routing", ["model", "uniform"])
def test_distinct_experts_are_counted_by_layer_and_step(routing: str, tmp_path: Path) -> None:
    """A row reads as many as a token has; by uniform routing several rows read what chance allows."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    with (
        patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cpu"),
        patch.multiple(bench_decode, PROMPT=8, FIRST=2, LAST=9),
    ):
        bench = Bench(tmp_path, 8, routing=routing)
        assert bench.count_experts(1) == TOP_K
        found = bench.count_experts(8)
    assert found is not None
    expected = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 8)
    assert found == pytest.approx(expected, abs=2) if routing == "uniform" else TOP_K <= found <= EXPERTS


def test_a_dense_model_has_no_experts_to_count(tmp_path: Path) -> None:
    dense = {name: value for name, value in MIXTURE.items() if "expert" not in name}
    fields = dense | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cpu"):
        assert Bench(tmp_path, 2).count_experts(1) is None
        with pytest.raises(AssertionError, match="experts"):
            Bench(tmp_path, 2, routing="uniform")
