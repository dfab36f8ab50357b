"""The rotary table against that of transformers."""

import pytest
import torch

from tandem.engine_core.layers.rotary import RotaryTable, frequencies
from tandem.engine_core.model_config import RopeConfig

CASES = [
    RopeConfig(),
    RopeConfig(theta=500000.0),
    RopeConfig(10000.0, "linear", 4.0),
    RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
    RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
    RopeConfig(10000.0, "llama3", 2.0, 1.0, 2.0, 64),
]


@pytest.mark.parametrize("head_dim", [64, 128, 20])
@pytest.mark.parametrize("rope", CASES)
def test_tables_equal_those_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters["low_freq_factor"] = rope.low_freq_factor
        parameters["high_freq_factor"] = rope.high_freq_factor
        parameters["original_max_position_embeddings"] = rope.original_max_positions
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    reference = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(frequencies(rope, head_dim), reference.inv_freq, atol=0, rtol=1e-6)
    positions = torch.tensor([0, 1, 5, 63, 700, 3000])
    cos, sin = reference(torch.zeros(1), positions[None])
    found_cos, found_sin = RotaryTable.build(rope, head_dim, 3001, torch.device("cpu"))(positions)
    assert found_cos.shape == found_sin.shape == (6, 1, head_dim)
    sign = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    torch.testing.assert_close(found_cos[:, 0], cos[0], atol=5e-4, rtol=0)
    torch.testing.assert_close(found_sin[:, 0], sin[0] * sign, atol=5e-4, rtol=0)
