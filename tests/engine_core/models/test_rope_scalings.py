"""Every rotary scaling: logits of a random Llama equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.rotary import attention_factor
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.registry import build_model, read_config
from tests.support.parity import SMALL, check_parity, save_random

FACTORS = [1.0 + 0.5 * index for index in range(8)]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_whole_pairs": {
        "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False,
    },
    "yarn_attention_factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.4},
    "yarn_mscale": {"factor": 40.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.7},
    "longrope": {
        "short_factor": FACTORS[::-1], "long_factor": FACTORS, "factor": 32.0, "original_max_position_embeddings": 256,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def save(directory: Path, name: str) -> Any:
    from transformers import LlamaConfig

    kind = name.partition("_")[0]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[name]}
    return save_random(directory, LlamaConfig(**SMALL, rope_parameters=rope), seed=len(name))


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_parity(tmp_path, save(tmp_path, name), schedules=((7, 4), (1000, 16)))


def test_dynamic_scaling_turns_all_sequences_as_the_longest(tmp_path: Path) -> None:
    """With --max-len 300 a sequence of 300 positions equals that of transformers, which takes its length."""
    reference = save(tmp_path, "dynamic")
    check_parity(tmp_path, reference, lengths=(300,), prefill=(290,), schedules=((64, 16),), max_positions=300)


@pytest.mark.parametrize("max_len", [64, 4096])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_of_a_million_positions_end_at_max_len(name: str, max_len: int, tmp_path: Path) -> None:
    """Only the length of a context is that of --max-len; the factor of LongRoPE and YaRN is that of all positions."""
    from transformers import LlamaConfig

    kind = name.partition("_")[0]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[name]}
    stated = SMALL | {"max_position_embeddings": 1_010_000}
    LlamaConfig(**stated, rope_parameters=rope, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    model = build_model(config, torch_build_context(torch.device("cpu"), torch.float32), max_len)
    assert isinstance(model, Decoder)
    (table,) = (one.table for one in model.rotary_tables)
    assert table.nbytes == max_len * 2 * config.ropes[0].rotary_dim * 4
    torch.testing.assert_close(table[0, 0], torch.full_like(table[0, 0], attention_factor(config.ropes[0])))
