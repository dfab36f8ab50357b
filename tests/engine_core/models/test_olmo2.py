"""OLMo 2: logits equal those of transformers, with norms behind the parts and over all heads together."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import SCHEDULES, SMALL, check_parity, save_random
from tests.support.thinned import thinned

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one_head_each_with_biases": {"num_key_value_heads": 4, "attention_bias": True},
    "single_kv_head_large_eps": {"num_key_value_heads": 1, "rms_norm_eps": 0.05},
    "yarn": {"rope_parameters": YARN},
}


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    from transformers import Olmo2Config

    check_parity(
        tmp_path, save_random(tmp_path, Olmo2Config(**SMALL | MODELS[name]), seed=len(name)), schedules=[schedule]
    )
