"""Gemma 2: logits equal those of transformers, with windows shorter and longer than sequences, and tight soft caps."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.models.registry import read_config
from tests.support.paged_model import load
from tests.support.parity import SCHEDULES, SMALL, check_parity, save_random

GEMMA2 = SMALL | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 4, "sliding_window": 8}
NORMS = (-0.5, 0.5)
"""Range of the stored weights, to which 1 is added."""
MODELS: dict[str, dict[str, Any]] = {
    "window_of_half_a_page": {},
    "window_across_pages": {"sliding_window": 21, "num_key_value_heads": 4},
    "window_beyond_the_sequences": {"sliding_window": 512, "num_key_value_heads": 1},
    "tight_caps": {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 3.0},
    "no_caps_untied_with_biases": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "scale_unlike_the_head_size": {"query_pre_attn_scalar": 40, "head_dim": 32, "hidden_size": 48},
    "layer_types_of_its_own": {
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
    "published_head_size": {"head_dim": 256, "num_hidden_layers": 2, "query_pre_attn_scalar": 256},
}
PUBLISHED = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_theta": 10000.0,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "torch_dtype": "bfloat16",
}
"""The fields of gemma-2-2b-it that matter."""


def save(directory: Path, name: str) -> Any:
    from transformers import Gemma2Config

    return save_random(directory, Gemma2Config(**GEMMA2 | MODELS[name]), seed=len(name), norms=NORMS)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    schedules = SCHEDULES if name == "window_of_half_a_page" else SCHEDULES[1:]
    check_parity(tmp_path, save(tmp_path, name), schedules=schedules)


def test_a_prompt_alone_in_its_step_equals_transformers(tmp_path: Path) -> None:
    check_parity(tmp_path, save(tmp_path, "tight_caps"), lengths=(20,), prefill=(19,), schedules=((1000, 16),))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.3), (torch.float16, 0.04)], ids=str)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    reference = save(tmp_path, "window_across_pages")
    check_parity(tmp_path, reference, dtype=dtype, tolerance=tolerance, schedules=((7, 4),))


def write(directory: Path, **changes: Any) -> Path:
    fields = {name: value for name, value in (PUBLISHED | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_published_config_alternates_windows(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    local, whole = LayerAttention(1 / 16, 4096, 50.0), LayerAttention(1 / 16, None, 50.0)
    assert config.attention == (local, whole) * 13
    assert (config.final_softcap, config.activation, config.tie_embeddings) == (30.0, Activation.GELU_TANH, True)
    assert (config.head_dim, config.qk_norm, config.eos_ids) == (256, False, (1, 107))


def test_missing_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    rest = ("head_dim", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "rope_theta", "eos_token_id")
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "max_position_embeddings", "num_key_value_heads")
    full = read_config(write(tmp_path, eos_token_id=1))
    # transformers reads hidden_activation and not hidden_act.
    assert read_config(write(tmp_path, hidden_act="gelu", **dict.fromkeys((*rest, *caps), ...))) == full


def test_caps_that_are_null_are_off(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, attn_logit_softcapping=None, final_logit_softcapping=None))
    assert config.final_softcap is None
    assert {layer.softcap for layer in config.attention} == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "relu"}, 'hidden_activation "relu"'),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ({"sliding_window": None}, r"sliding_window\b.* not set\b"),
        ({"layer_types": ["full_attention"]}, r"layer_types\b.*\b1\b.* 26\b"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, **changes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float16_is_warned_of(dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "window_of_half_a_page")
    with caplog.at_level(logging.WARNING):
        load(tmp_path, dtype)
    assert ("float16" in caplog.text) == (dtype == torch.float16)
