"""Qwen 2 and 2.5: logits equal those of transformers, with windows of the upper layers, and biases of q, k and v."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import SMALL, check_parity, save_random

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "window_switched_off": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    "window_of_the_upper_layers": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "window_beyond_the_sequences": {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0},
    "window_by_layer_types": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    from transformers import Qwen2Config

    check_parity(tmp_path, save_random(tmp_path, Qwen2Config(**SMALL | MODELS[name]), seed=len(name)))
