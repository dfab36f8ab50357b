"""Logits equal those of transformers, whatever the shape of the model, the batch and the chunks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine_core.attention.base import ForwardBatch, Span
from tandem.engine_core.attention.torch import TorchPlanner
from tests.support import parity
from tests.support.paged_model import PagedRun, chunked, load
from tests.support.parity import LENGTHS, PREFILL, SMALL, TOLERANCE, random_tokens, reference_logits, worst
from tests.support.thinned import thinned

BASE = SMALL | {"rms_norm_eps": 1e-5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HALF_PRECISION = {torch.bfloat16: 0.4, torch.float16: 0.05}
"""Largest error of a logit, of logits up to 6. Measured over three models: at most 0.25 and 0.03."""
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one_head_each": {"num_key_value_heads": 4},
    "single_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "llama3_rope_tied_wide": {
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
        "hidden_size": 96,
        "head_dim": 24,
    },
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "own_head_dim": {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 60},
    "attention_bias": {"attention_bias": True},
    "all_biases": {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8},
    "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True},
    "one_layer": {"num_hidden_layers": 1, "rms_norm_eps": 1e-6},
}


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0, **saving: Any) -> Any:
    """Save a random checkpoint, with random norms and biases, and return transformers' model."""
    from transformers import LlamaConfig

    return parity.save_random(directory, LlamaConfig(**BASE | fields), seed=seed, **saving)


SCHEDULES = ((1, 16), (3, 4), (16, 1), (1000, 16))
"""As those of the harness, with pages of one position too."""


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    parity.check_parity(tmp_path, save_random(tmp_path, MODELS[name], seed=len(name)), schedules=[schedule])


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {}, seed=8)
    parity.check_parity(tmp_path, reference, dtype=dtype, tolerance=HALF_PRECISION[dtype], schedules=[(7, 4)])


@pytest.mark.parametrize("scaled", [False, True])
def test_old_config_layout_gives_the_same_model(scaled: bool, tmp_path: Path) -> None:
    rope = LLAMA3 if scaled else {"rope_type": "default", "rope_theta": 75000.0}
    reference = save_random(tmp_path, {"rope_parameters": rope})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert "rope_scaling" not in config
    del config["rope_parameters"]
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None
    path.write_text(json.dumps(config))
    tokens = random_tokens(LENGTHS, BASE["vocab_size"], seed=2)
    found = PagedRun(load(tmp_path), tokens, 8, seed=0).run(chunked(LENGTHS, PREFILL, 16))
    assert worst(found, reference_logits(reference, tokens)) < TOLERANCE


def test_forward_returns_sampled_positions_only(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    tokens = random_tokens((12, 7), BASE["vocab_size"], seed=3)
    run = PagedRun(load(tmp_path), tokens, 4, seed=0)
    everything = run.step([(0, 0, 12), (1, 0, 7)])
    planner = TorchPlanner(run.model.config.attention_kinds)
    positions = torch.cat((torch.arange(12), torch.arange(7)))
    rows = torch.tensor([0] * 12 + [1] * 7)
    slots = run.page_table.slots(rows, positions)
    for sampled in ([18], [11, 18], []):
        with torch.inference_mode():
            attention = planner.plan([Span(0, 0, 0, 12), Span(1, 12, 0, 7)], [run.page_table])
            index = torch.tensor(sampled, dtype=torch.int64)
            batch = ForwardBatch(torch.cat(tokens), positions, [slots], index, attention)
            hidden = run.model.forward(batch, run.storage)
            assert hidden.shape == (len(sampled), BASE["hidden_size"])
            torch.testing.assert_close(run.model.logits(hidden), everything[sampled], atol=1e-5, rtol=0)
