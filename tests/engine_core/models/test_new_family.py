"""A family with norms and an activation of its own needs blocks, a line in the registry and its config's fields.

Gemma (Gemma Team, 2024) is the example: norms that multiply by 1 + weight, GELU's tanh approximation, and an embedding
scaled by the square root of the hidden size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.layers.attention import Attention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig, layer_prefix
from tandem.engine_core.models import registry
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.llama import read_config
from tests.engine_core.models.test_llama import BASE
from tests.support.paged_model import PagedRun, chunked, load
from tests.support.parity import LENGTHS, PREFILL, TOLERANCE, random_tokens, reference_logits, save_random, worst


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    def norm() -> RMSNorm:
        return RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)

    config = structs.replace(config, activation=Activation.GELU_TANH)
    blocks = [
        PreNormBlock(
            norm(),
            Attention.build(config, layer, f"{layer_prefix(index)}self_attn.", context),
            norm(),
            GatedMLP.build(config, f"{layer_prefix(index)}mlp.", context),
        )
        for index, layer in enumerate(config.attention)
    ]
    return Decoder.build(config, max_positions, context, blocks, norm(), embedding_scale=config.hidden_size**0.5)


def save_gemma(directory: Path) -> Any:
    """Save a random checkpoint with random norms, and return transformers' model."""
    from transformers import GemmaConfig

    model = save_random(directory, GemmaConfig(**BASE | {"head_dim": 16}), seed=3, norms=(-0.5, 0.5))
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu_pytorch_tanh"}))
    return model


def test_a_family_of_its_own_norms_and_activation_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save_gemma(tmp_path)
    monkeypatch.setitem(registry.FAMILIES, "GemmaForCausalLM", registry.Family("Gemma", read_config, build))
    tokens = random_tokens(LENGTHS, BASE["vocab_size"], seed=1)
    model = load(tmp_path)
    for slot in model.weight_slots():
        assert slot.target.dtype == torch.float32
    found = PagedRun(model, tokens, 16, seed=7).run(chunked(LENGTHS, PREFILL, 16))
    assert worst(found, reference_logits(reference, tokens)) < TOLERANCE
