"""OLMoE: logits equal those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.models.registry import read_config
from tests.support import parity
from tests.support.paged_model import PagedRun, load
from tests.support.parity import SMALL
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint
from tests.support.thinned import thinned

OLMOE = SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_qkv": 0.5},
    "renormalized_clipped": {"norm_topk_prob": True, "clip_qkv": 2.0, "num_key_value_heads": 4},
    "biases_tied": {"attention_bias": True, "tie_word_embeddings": True},
    "many_experts": {"num_experts": 33, "num_experts_per_tok": 8},
}


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint, with random norms, and return transformers' model."""
    from transformers import OlmoeConfig

    return parity.save_random(directory, OlmoeConfig(**OLMOE | fields), seed=seed)


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), parity.SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    parity.check_parity(tmp_path, save_random(tmp_path, MODELS[name], seed=len(name)), schedules=[schedule])


def test_router_outputs_equal_those_of_transformers(tmp_path: Path) -> None:
    reference = save_random(tmp_path, {"num_experts": 20})
    x, config = torch.randn(50, 64), read_config(tmp_path)
    assert config.moe is not None and config.moe.routing is Routing.SOFTMAX
    for layer, other in zip(load(tmp_path).layers, reference.model.layers, strict=True):
        with torch.no_grad():
            _, weights, ids = other.mlp.gate(x)
        routed = moe.route(moe.router_logits(x, layer.mlp.router), config.moe.top_k, config.moe.routing)
        assert torch.equal(routed.ids.long(), ids)
        torch.testing.assert_close(routed.weights, weights, atol=1e-6, rtol=1e-5)


def test_fp8_weights_equal_the_dequantized_ones(tmp_path: Path) -> None:
    save_random(tmp_path, {"clip_qkv": 1.0})
    quantize_checkpoint(tmp_path, LAYOUTS["fp8_channel"])
    tokens = parity.random_tokens((19,), parity.VOCAB, seed=1)
    folders = tmp_path, tmp_path / "plain"
    found, expected = (PagedRun(load(folder), tokens, 4, seed=1).step([(0, 0, 19)]) for folder in folders)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"num_experts_per_tok": 7}, r"num_experts_per_tok 7\b.*num_experts 6\b"), ({"clip_qkv": -1.0}, r"clip_qkv")],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ConfigError, match=problem):
        read_config(tmp_path)
