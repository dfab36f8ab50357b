"""Qwen3-Next: logits equal those of transformers, with projections that are grouped by key head in the checkpoint."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tests.engine_core.models.test_qwen3_5 import QWEN35
from tests.engine_core.models.test_qwen3_5_moe import SIZES, save_hybrid, split_experts
from tests.support import parity
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens
from tests.support.quantized_checkpoint import LAYOUTS, Layout, awq, gptq, packed_tensors, quantize_layers
from tests.support.thinned import thinned

FIELDS: dict[str, Any] = QWEN35 | SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three_value_heads_per_key_head": {"linear_num_value_heads": 6, "linear_value_head_dim": 32},
    "one_value_head_per_key_head": {"linear_num_value_heads": 2, "linear_key_head_dim": 32},
    "dense_layers": {"mlp_only_layers": [1], "norm_topk_prob": False},
    "every_other_layer_tied": {"decoder_sparse_step": 2, "tie_word_embeddings": True},
    "all_dense": {"mlp_only_layers": [0, 1, 2, 3]},
    "attention_first": {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
}
PREFIX = "model.layers.0.linear_attn."


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint with random norms, decays and biases, and return transformers' model."""
    from transformers import Qwen3NextConfig

    return save_hybrid(directory, Qwen3NextConfig(**FIELDS | fields), seed)


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), parity.SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    parity.check_parity(tmp_path, save_random(tmp_path, MODELS[name], seed=len(name)), schedules=[schedule])


def test_drafts_are_dropped(tmp_path: Path) -> None:
    reference = save_random(tmp_path, {})
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.zeros(4, 8)}, path, {"format": "pt"})
    parity.check_parity(tmp_path, reference, schedules=[(1000, 16)])


QUANTIZED: dict[str, tuple[Layout, str]] = {
    "fp8 blocks": (LAYOUTS["fp8_block"], r"in_proj_ba$"),
    "fp8 channels": (LAYOUTS["fp8_channel"], r"in_proj_ba$"),
    "fp8 channels, all": (LAYOUTS["fp8_channel"], "^$"),
    "fp8 tensors": (LAYOUTS["fp8_tensor_static"], r"in_proj_ba$"),
    "w4a16": (packed_tensors(True), r"in_proj_ba$|experts"),
    "w4a16 with zero points": (packed_tensors(False), r"in_proj_ba$|experts"),
    "gptq act-order": (gptq(False, True), r"in_proj_ba$|experts"),
    "awq": (awq(), r"in_proj_ba$|experts"),
}
"""Layout of quantized layers, and expression of the layers that are not."""


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_projections_are_ordered_like_their_weights(name: str, tmp_path: Path) -> None:
    layout, plain = QUANTIZED[name]
    fields = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "hidden_size": 128}
    if name == "fp8 blocks":
        fields |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 16}
    save_random(tmp_path, fields | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32})
    if "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors"):
        split_experts(tmp_path)

    def layout_of(module: str) -> Layout | None:
        return layout if re.search(r"_proj(_\w+)?$", module) and not re.search(plain, module) else None

    quantize_layers(tmp_path, layout_of, layout.config)
    tokens = random_tokens((40,), parity.VOCAB, seed=1)
    steps = [[(0, 0, 38)], [(0, 38, 1)], [(0, 39, 1)]]
    folders = tmp_path, tmp_path / "plain"
    (found,), (expected,) = (PagedRun(load(folder), tokens, 16, seed=1).run(steps) for folder in folders)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_fp8_at_load_orders_scales_too(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    save_random(tmp_path, layers)
    quantized, plain = (load(tmp_path, quantization=given).layers[0].attention.qkv for given in (FP8_AT_LOAD, None))
    x = torch.eye(64)
    found, expected = (linear.apply(x).t() for linear in (quantized, plain))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.07)


@pytest.mark.parametrize(("name", "part"), [("fp8_block", "in_proj_qkvz"), ("packed_zeros", "in_proj_ba")])
def test_scales_that_heads_share_are_refused(name: str, part: str, tmp_path: Path) -> None:
    """With heads of 16 outputs, blocks of 128 are of several heads; so are words of 8 gates."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    save_random(tmp_path, layers | {"linear_num_value_heads": 8})
    layout = LAYOUTS[name]
    quantize_layers(tmp_path, lambda module: layout if part in module else None, layout.config)
    with pytest.raises(ConfigError, match=part):
        load(tmp_path)


def test_a_missing_projection_is_named_once(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path, name = tmp_path / "model.safetensors", f"{PREFIX}in_proj_qkvz.weight"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert str(refused.value).count(name) == 1 and "[192, 64]" in str(refused.value)


def test_a_published_config_is_read() -> None:
    config = read_config(Path("benchmarks/shapes/qwen3-next-80b-a3b"))
    assert config.moe is not None
    assert (config.moe.experts, config.moe.top_k, config.moe.width, config.moe.shared_width) == (512, 10, 512, 512)
    assert config.moe.routing is Routing.TOP_K_SOFTMAX and config.moe.layers == frozenset(range(48))
    assert config.attention_layers == tuple(range(3, 48, 4))
    head = config.vocab_size * config.hidden_size
    assert 79e9 < config.projection_weights + 2 * head < 80.5e9
    assert 3.4e9 < config.active_weights + head < 3.8e9
