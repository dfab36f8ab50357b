"""Qwen 3: logits equal those of transformers, and norms of queries and keys must match the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine_core.errors import ConfigError
from tests.engine_core.loader.test_weights import ATTENTION, fuse, rewrite
from tests.support import parity
from tests.support.paged_model import load
from tests.support.parity import SMALL
from tests.support.thinned import thinned

QWEN3 = SMALL | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
HALF_PRECISION = {torch.bfloat16: 0.3, torch.float16: 0.04}
"""Largest error of a logit, of logits up to 6. Measured over three models: at most 0.18 and 0.022."""
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "wide_heads_tied": {"hidden_size": 48, "head_dim": 32, "num_attention_heads": 6, "tie_word_embeddings": True},
    "single_kv_head_large_eps": {"num_key_value_heads": 1, "rms_norm_eps": 0.05},
    "one_head_each_with_biases": {"num_key_value_heads": 4, "attention_bias": True},
    "published_head_dim": {"head_dim": 128, "num_hidden_layers": 2},
    "window_of_the_upper_layers": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "window_switched_off": {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
}


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint, with random norms and biases, and return transformers' model."""
    from transformers import Qwen3Config

    return parity.save_random(directory, Qwen3Config(**QWEN3 | fields), seed=seed)


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), parity.SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    parity.check_parity(tmp_path, save_random(tmp_path, MODELS[name], seed=len(name)), schedules=[schedule])


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {}, seed=8)
    parity.check_parity(tmp_path, reference, dtype=dtype, tolerance=HALF_PRECISION[dtype], schedules=[(7, 4)])


@pytest.mark.parametrize("tied", [False, True])
def test_fused_projections_load_to_the_same_model(tied: bool, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {"tie_word_embeddings": tied})
    tensors = fuse(load_file(tmp_path / "model.safetensors"))
    assert f"{ATTENTION}.qkv_proj.weight" in tensors
    assert f"{ATTENTION}.q_norm.weight" in tensors
    rewrite(tmp_path, tensors)
    parity.check_parity(tmp_path, reference, schedules=[(1000, 4)])


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{ATTENTION}.k_norm.weight"]
    rewrite(tmp_path, tensors)
    with pytest.raises(ConfigError, match=rf"missing {ATTENTION}\.k_norm\.weight: expected \[16\]"):
        load(tmp_path)


def test_a_llama_refuses_norms_of_queries_and_keys(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=rf"unexpected {ATTENTION}\.q_norm\.weight: \[16\]"):
        load(tmp_path)
