"""Mixtral: logits equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import parity
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
