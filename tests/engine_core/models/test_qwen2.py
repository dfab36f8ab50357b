"""Qwen 2 and 2.5: logits equal those of transformers, with windows of the upper layers, and biases of q, k and v."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.registry import read_config
from tests.engine_core.loader.test_weights import ATTENTION, fuse, rewrite
from tests.support.paged_model import load
from tests.support.parity import SCHEDULES, SMALL, check_parity, save_random
from tests.support.thinned import thinned

HALF_PRECISION = {torch.bfloat16: 0.4, torch.float16: 0.05}
"""Largest error of a logit, of logits up to 6. Measured over three models: at most 0.26 and 0.029."""
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


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    from transformers import Qwen2Config

    check_parity(
        tmp_path, save_random(tmp_path, Qwen2Config(**SMALL | MODELS[name]), seed=len(name)), schedules=[schedule]
    )


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import Qwen2Config

    reference = save_random(tmp_path, Qwen2Config(**SMALL), seed=8)
    check_parity(tmp_path, reference, dtype=dtype, tolerance=HALF_PRECISION[dtype], schedules=[(7, 4)])


def test_fused_projections_load_to_the_same_model(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    reference = save_random(tmp_path, Qwen2Config(**SMALL))
    tensors = fuse(load_file(tmp_path / "model.safetensors"))
    assert f"{ATTENTION}.qkv_proj.bias" in tensors
    rewrite(tmp_path, tensors)
    check_parity(tmp_path, reference, schedules=[(1000, 4)])


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_missing_bias_is_named(part: str, tmp_path: Path) -> None:
    from transformers import Qwen2Config

    save_random(tmp_path, Qwen2Config(**SMALL))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{ATTENTION}.{part}.bias"]
    rewrite(tmp_path, tensors)
    with pytest.raises(ConfigError, match=rf"missing {ATTENTION}\.{part}\.bias"):
        load(tmp_path)


def test_a_bias_of_the_output_is_unexpected(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    save_random(tmp_path, Qwen2Config(**SMALL))
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors | {f"{ATTENTION}.o_proj.bias": torch.zeros(64)})
    with pytest.raises(ConfigError, match=rf"unexpected {ATTENTION}\.o_proj\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, r"sliding_window\b.* not set\b"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, r"layer_types\b.* 2\b.* 3\b"),
        ({"layer_types": ["chunked_attention"] * 3}, r"layer_types chunked_attention\b"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0\b"),
    ],
)
def test_malformed_windows_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    sizes = {name: value for name, value in SMALL.items() if name != "initializer_range"}
    config = {"architectures": ["Qwen2ForCausalLM"], **sizes, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize("trained", [None, 262_144])
def test_models_of_a_million_positions_are_served_without_dual_chunk_attention_and_log_it(
    trained: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {name: value for name, value in SMALL.items() if name != "initializer_range"}
    config = {"architectures": ["Qwen2ForCausalLM"], **sizes, "max_position_embeddings": 1_010_000}
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": trained}
    (tmp_path / "config.json").write_text(
        json.dumps(config | ({"dual_chunk_attention_config": chunks} if trained else {}))
    )
    assert read_config(tmp_path).max_positions == 1_010_000
    assert (" 262144 " in caplog.text) is (trained is not None)
