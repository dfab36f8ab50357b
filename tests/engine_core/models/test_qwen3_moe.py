"""Qwen 3 MoE: logits equal those of transformers, from either layout of the experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.models.registry import read_config
from tests.support import parity
from tests.support.paged_model import load
from tests.support.parity import SMALL
from tests.support.thinned import thinned

QWEN3_MOE = SMALL | {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalized": {"norm_topk_prob": True},
    "dense_layers": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "every_other_layer": {"decoder_sparse_step": 2, "tie_word_embeddings": True},
    "one_expert_a_token": {"num_experts": 5, "num_experts_per_tok": 1, "attention_bias": True},
    "all_experts": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 17},
    "many_experts": {"num_experts": 33, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
}


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint, with random norms, and return transformers' model."""
    from transformers import Qwen3MoeConfig

    return parity.save_random(directory, Qwen3MoeConfig(**QWEN3_MOE | fields), seed=seed)


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), parity.SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    parity.check_parity(tmp_path, save_random(tmp_path, MODELS[name], seed=len(name)), schedules=[schedule])


@pytest.mark.parametrize("renormalized", [False, True])
def test_router_outputs_equal_those_of_transformers(renormalized: bool, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {"norm_topk_prob": renormalized, "num_experts": 20})
    x, config = torch.randn(50, 64), read_config(tmp_path)
    assert config.moe is not None
    for layer, other in zip(load(tmp_path).layers, reference.model.layers, strict=True):
        with torch.no_grad():
            logits, weights, ids = other.mlp.gate(x)
        found = moe.router_logits(x, layer.mlp.router)
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
        routed = moe.route(found, config.moe.top_k, config.moe.routing)
        assert torch.equal(routed.ids.long(), ids)
        torch.testing.assert_close(routed.weights, weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("renormalized", [False, True])
def test_bfloat16_experts_equal_those_of_transformers_with_its_routing(renormalized: bool, tmp_path: Path) -> None:
    """Routing differs only where the margin of the last chosen expert is below twice the error of the logits."""
    reference = save_random(tmp_path, {"norm_topk_prob": renormalized, "num_experts": 20})
    x, top_k = torch.randn(200, 64), QWEN3_MOE["num_experts_per_tok"]
    method = Routing.TOP_K_SOFTMAX if renormalized else Routing.SOFTMAX
    for layer, other in zip(load(tmp_path, torch.bfloat16).layers, reference.model.layers, strict=True):
        with torch.no_grad():
            logits, weights, ids = other.mlp.gate(x)
            exact = other.mlp.experts(x, ids, weights)
            rounded = other.mlp.experts.bfloat16()(x.bfloat16(), ids, weights.bfloat16())
        own = layer.mlp.experts.run(x.bfloat16(), Routed(ids.int(), weights))
        assert relative_error(own, exact) < max(0.01, 1.2 * relative_error(rounded, exact))
        found = moe.router_logits(x.bfloat16(), layer.mlp.router)
        error = (found - logits).abs().amax(1)
        ordered = logits.sort(1, descending=True).values
        margin = ordered[:, top_k - 1] - ordered[:, top_k]
        flipped = (moe.route(found, top_k, method).ids.long().sort(1).values != ids.sort(1).values).any(1)
        assert (margin[flipped] < 2 * error[flipped]).all() and flipped.float().mean() < 0.1


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("stored", "kept"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")])
def test_a_router_is_not_rounded_to_the_dtype_of_the_model(stored: str, kept: str, tmp_path: Path) -> None:
    save_random(tmp_path, {"num_hidden_layers": 2})
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.gate.weight"
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(path).items()}
    tensors[name] = torch.randn(6, 64).to(getattr(torch, stored))
    save_file(tensors, path, {"format": "pt"})
    first, router = (layer.mlp.router for layer in load(tmp_path, dtype=torch.bfloat16).layers)
    assert first.dtype == torch.bfloat16
    assert router.dtype == getattr(torch, kept) and torch.equal(router, tensors[name].to(router.dtype))


def fuse_experts(directory: Path, layer: int) -> None:
    """Replace the tensors of the experts of a layer by two for all of them."""
    path = directory / "model.safetensors"
    tensors, prefix = load_file(path), f"model.layers.{layer}.mlp.experts."
    experts = range(QWEN3_MOE["num_experts"])

    def take(part: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in experts])

    tensors[f"{prefix}gate_up_proj"] = torch.cat((take("gate"), take("up")), 1)
    tensors[f"{prefix}down_proj"] = take("down")
    save_file(tensors, path, {"format": "pt"})


def test_fused_experts_load_to_the_same_model(tmp_path: Path) -> None:
    reference = save_random(tmp_path, {})
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    fuse_experts(tmp_path, 0)
    fuse_experts(tmp_path, 2)
    parity.check_parity(tmp_path, reference, schedules=[(1000, 4)])


@pytest.mark.parametrize("kept", ["both", "neither"])
def test_experts_that_are_missing_or_given_twice_are_named(kept: str, tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors = load_file(path)
    if kept == "neither":
        del tensors[name]
        found = rf"missing {name}: expected \[64, 40\]"
    else:
        down = [tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in range(6)]
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.stack(down)
        found = "given twice"
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=found):
        load(tmp_path)


def test_a_published_config_is_read() -> None:
    config = read_config(Path("benchmarks/shapes/qwen3-30b-a3b"))
    assert config.moe is not None
    assert (config.moe.experts, config.moe.top_k, config.moe.width) == (128, 8, 768)
    assert config.moe.routing is Routing.TOP_K_SOFTMAX and config.moe.layers == frozenset(range(48))
    assert 30.0e9 < config.projection_weights + 2 * config.vocab_size * config.hidden_size < 31.0e9
    assert 3.2e9 < config.active_weights + 2 * config.vocab_size * config.hidden_size < 3.4e9


def test_more_experts_of_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 7}))
    with pytest.raises(ConfigError, match=r"num_experts_per_tok 7\b.*num_experts 6\b"):
        read_config(tmp_path)
