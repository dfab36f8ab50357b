"""Phi-3: logits equal those of transformers, with heads that turn whole or in part, LongRoPE and windows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.rope_config import LongRopeScaling, RopeConfig
from tests.support.parity import SCHEDULES, SMALL, check_parity, save_random
from tests.support.thinned import thinned

HALF_PRECISION = {torch.bfloat16: 0.7, torch.float16: 0.14}
"""Largest error of a logit, of logits up to 5.5; an attention factor of 1.4 doubles the scores, and so their rounding.

Measured over three models: at most 0.46 and 0.096, where transformers is 0.52 and 0.048 from its own float32.
"""
PHI3 = {**SMALL, "rms_norm_eps": 1e-5}


def longrope(pairs: int, **fields: Any) -> dict[str, Any]:
    """Return `rope_parameters` of LongRoPE, with factors far apart."""
    short, long = [1.0 + 0.1 * index for index in range(pairs)], [2.0 + 1.5 * index for index in range(pairs)]
    return {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long, **fields}


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
MODELS: dict[str, dict[str, Any]] = {
    "whole_heads": {},
    "partial_tied": {"rope_parameters": PARTIAL, "tie_word_embeddings": True},
    "one_pair_turns": {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.125}},
    "partial_with_a_window": {"rope_parameters": PARTIAL, "sliding_window": 13, "num_key_value_heads": 1},
    "window_beyond_the_positions": {"sliding_window": 4096},
    "large_base_one_head_each": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
        "num_key_value_heads": 4,
    },
}


def config_of(fields: dict[str, Any]) -> Any:
    from transformers import Phi3Config

    return Phi3Config(**PHI3 | fields)


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    check_parity(tmp_path, save_random(tmp_path, config_of(MODELS[name]), seed=len(name)), schedules=[schedule])


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    rope = longrope(6, partial_rotary_factor=0.75)
    reference = save_random(tmp_path, config_of({"rope_parameters": rope, "original_max_position_embeddings": 16}))
    check_parity(
        tmp_path, reference, dtype=dtype, tolerance=HALF_PRECISION[dtype], lengths=(17, 40, 23, 64),
        prefill=(1, 39, 17, 30), schedules=[(7, 4)],
    )  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_sequences_up_to_the_original_positions_take_the_short_factors(share: float, tmp_path: Path) -> None:
    """With --max-len at the original positions, every sequence is one of those for which transformers does so."""
    rope = longrope(int(16 * share) // 2, partial_rotary_factor=share)
    reference = save_random(tmp_path, config_of({"rope_parameters": rope, "original_max_position_embeddings": 64}))
    check_parity(tmp_path, reference, max_positions=64)


@pytest.mark.parametrize("attention_factor", [None, 1.7])
def test_sequences_beyond_the_original_positions_take_the_long_factors(
    attention_factor: float | None, tmp_path: Path
) -> None:
    rope = longrope(6, partial_rotary_factor=0.75)
    if attention_factor is not None:
        rope["attention_factor"] = attention_factor
    reference = save_random(tmp_path, config_of({"rope_parameters": rope, "original_max_position_embeddings": 16}))
    check_parity(tmp_path, reference, lengths=(17, 40, 23, 64), prefill=(1, 39, 17, 30))


def test_split_projections_load_to_the_same_model(tmp_path: Path) -> None:
    reference = save_random(tmp_path, config_of({"rope_parameters": PARTIAL}))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("qkv_proj.weight", "gate_up_proj.weight"))]:
        whole = tensors.pop(name)
        prefix, fused = name.removesuffix(".weight").rsplit(".", 1)
        parts = (
            {"q_proj": 64, "k_proj": 32, "v_proj": 32} if fused == "qkv_proj" else {"gate_proj": 112, "up_proj": 112}
        )
        for part, tensor in zip(parts, whole.split(list(parts.values())), strict=True):
            tensors[f"{prefix}.{part}.weight"] = tensor.clone()
    save_file(tensors, path)
    check_parity(tmp_path, reference, schedules=((7, 4),))


def rewrite(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_the_published_layout_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    """Fields outside `rope_scaling`, as in Phi-4-mini, and the earlier names of LongRoPE."""
    rope = longrope(6, partial_rotary_factor=0.75)
    reference = save_random(tmp_path, config_of({"rope_parameters": rope, "original_max_position_embeddings": 16}))
    scaling = {"type": kind, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    rewrite(tmp_path, rope_parameters=..., rope_scaling=scaling, rope_theta=10000.0, partial_rotary_factor=0.75)
    check_parity(tmp_path, reference, lengths=(20, 40), prefill=(20, 30), schedules=((7, 4),))


def test_factors_of_another_number_of_pairs_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, config_of({}))
    rewrite(tmp_path, rope_parameters=longrope(6), original_max_position_embeddings=16)
    with pytest.raises(ConfigError, match=r"short_factor\b.* 6\b.* 8 pairs"):
        read_config(tmp_path)


def test_the_published_phi_4_mini_config_is_read() -> None:
    config = read_config(Path(__file__).parents[3] / "benchmarks" / "shapes" / "phi-4-mini")
    assert (config.heads, config.kv_heads, config.head_dim, config.layers) == (24, 8, 128, 32)
    assert (config.max_positions, config.tie_embeddings, config.intermediate_size) == (131072, True, 8192)
    # The window of 262,144 positions is never outgrown.
    assert {layer.window for layer in config.attention} == {None}
    (rope,) = config.ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope == RopeConfig(96, 10000.0, rope.scaling)
    assert rope.scaling.original_positions == 4096
    # The square root of 1 + log(32) / log(4096).
    assert rope.scaling.attention_factor == pytest.approx(1.1902380714238083)


def test_another_architecture_of_phi_3_is_refused_by_name(tmp_path: Path) -> None:
    save_random(tmp_path, config_of({}))
    rewrite(tmp_path, architectures=["Phi3SmallForCausalLM"])
    with pytest.raises(ConfigError, match=r"\bPhi3SmallForCausalLM\b.*Phi-3 and Phi-4"):
        read_config(tmp_path)
