"""Mistral: logits equal those of transformers, with windows shorter and longer than the sequences, and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import SCHEDULES, SMALL, check_parity, save_random
from tests.support.thinned import thinned

HALF_PRECISION = {torch.bfloat16: 0.4, torch.float16: 0.06}
"""Largest error of a logit, of logits up to 6. Measured over three models: at most 0.21 and 0.041."""
MODELS: dict[str, dict[str, Any]] = {
    "no_window_tied": {"sliding_window": None, "tie_word_embeddings": True},
    "window_of_one_page": {"sliding_window": 4},
    "window_across_pages": {"sliding_window": 13, "num_key_value_heads": 4},
    "window_beyond_the_sequences": {"sliding_window": 128, "num_key_value_heads": 1},
    "head_dim_of_its_own": {"sliding_window": None, "head_dim": 32, "hidden_size": 60, "num_attention_heads": 6},
}


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    from transformers import MistralConfig

    check_parity(
        tmp_path, save_random(tmp_path, MistralConfig(**SMALL | MODELS[name]), seed=len(name)), schedules=[schedule]
    )


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import MistralConfig

    reference = save_random(tmp_path, MistralConfig(**SMALL, sliding_window=13), seed=8)
    check_parity(tmp_path, reference, dtype=dtype, tolerance=HALF_PRECISION[dtype], schedules=[(7, 4)])
