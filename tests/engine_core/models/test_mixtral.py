"""Mixtral: logits equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.models.registry import read_config
from tests.support import parity
from tests.support.paged_model import load
from tests.support.parity import SMALL
from tests.support.thinned import thinned

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "window": {"sliding_window": 9, "num_local_experts": 3, "head_dim": 32},
    "one_expert_a_token": {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 75},
}


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), parity.SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    from transformers import MixtralConfig

    fields = SMALL | {"num_local_experts": 4} | MODELS[name]
    reference = parity.save_random(tmp_path, MixtralConfig(**fields), seed=len(name))
    parity.check_parity(tmp_path, reference, schedules=[schedule])


def test_router_outputs_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    fields = SMALL | {"num_local_experts": 7, "num_experts_per_tok": 3}
    reference, x = parity.save_random(tmp_path, MixtralConfig(**fields)), torch.randn(50, 64)
    config = read_config(tmp_path).moe
    assert config is not None and config.top_k == 3
    for layer, other in zip(load(tmp_path).layers, reference.model.layers, strict=True):
        with torch.no_grad():
            logits, weights, ids = other.mlp.gate(x)
        found = moe.router_logits(x, layer.mlp.router)
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
        routed = moe.route(found, config.top_k, config.routing)
        assert torch.equal(routed.ids.long(), ids)
        torch.testing.assert_close(routed.weights, weights, atol=1e-6, rtol=1e-5)
