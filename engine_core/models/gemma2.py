"""Gemma 2 (Gemma Team, 2024).

Layers with a sliding window alternate with layers without. There are norms before and after every block; they multiply
by 1 plus the stored weight. Scores of attention and logits are soft-capped, and embeddings are scaled.
"""

import logging
from typing import ClassVar

import torch
from msgspec import field

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.sandwich_block import build_sandwich
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.sliding_fields import windows_of_types
from tandem.engine_core.rope_config import FULL, SLIDING, Count, Positive

logger = logging.getLogger(__name__)


class Gemma2Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    default_end: ClassVar[int] = 1
    hidden_act: str = field(default="gelu_pytorch_tanh", name="hidden_activation")
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    query_pre_attn_scalar: Positive = 256
    """Attention scores are scaled by its inverse square root instead of the head size's."""
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    sliding_window: Count | None = 4096
    layer_types: list[str] | None = None


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Gemma2Fields)
    layers, head_dim = fields.num_hidden_layers, fields.head_dim or fields.hidden_per_head
    types = fields.layer_types or [FULL if index % 2 else SLIDING for index in range(layers)]
    windows = windows_of_types(types, layers, fields.sliding_window)
    scale, cap = fields.query_pre_attn_scalar**-0.5, fields.attn_logit_softcapping
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(scale, window, cap) for window in windows],
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        final_softcap=fields.final_logit_softcapping,
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    if context.dtype == torch.float16:
        logger.warning("activations of Gemma 2 may exceed float16's range, and their requests fail; use bfloat16")
    blocks, norm = build_sandwich(config, context)
    return Decoder.build(config, max_positions, context, blocks, norm, embedding_scale=config.hidden_size**0.5)
