"""Gemma 3 (Gemma Team, 2025), its text models.

Most layers are local, with a sliding window and a rotary embedding of a small base; the others are global, with a large
base that may be scaled. There are norms before and after every block and over each query and key head; they multiply by
1 plus the stored weight. Embeddings are scaled.
"""

import logging
from typing import ClassVar

import torch
from msgspec import field

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.sandwich_block import build_sandwich
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource, Layers
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.sliding_fields import windows_of_types
from tandem.engine_core.rope_config import FULL, SLIDING, Base, Count, Positive, RopeReader

logger = logging.getLogger(__name__)


class Gemma3Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads.

    The larger models' files leave out most of those that have defaults.
    """

    vocab_size: Count = 262_208
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 131_072
    tie_word_embeddings: bool = True
    default_end: ClassVar[int] = 1
    hidden_act: str = field(default="gelu_pytorch_tanh", name="hidden_activation")
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    query_pre_attn_scalar: Positive = 256
    """Attention scores are scaled by its inverse square root instead of the head size's."""
    final_logit_softcapping: Positive | None = None
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    """Every this many layers one is global, if there are no `layer_types`."""
    layer_types: list[str] | None = None
    rope_local_base_freq: Base | None = None
    """Base of the rotary embedding of local layers."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Gemma3Fields)
    layers, pattern = fields.num_hidden_layers, fields.sliding_window_pattern
    head_dim = fields.head_dim or fields.hidden_per_head
    types = fields.layer_types or [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]
    windows = windows_of_types(types, layers, fields.sliding_window)
    scale = fields.query_pre_attn_scalar**-0.5
    reader = RopeReader(head_dim=head_dim, max_positions=fields.max_position_embeddings)
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(scale, window, rotary=0 if window is None else 1) for window in windows],
        ropes=reader.read_by_layer_type(
            fields.rope_theta, fields.rope_local_base_freq, fields.rope_scaling, fields.rope_parameters
        ),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qk_norm=True,
        final_softcap=fields.final_logit_softcapping,
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    if context.dtype == torch.float16:
        logger.warning("activations of Gemma 3 may exceed float16's range, and their requests fail; use bfloat16")
    blocks, norm = build_sandwich(config, context)
    return Decoder.build(config, max_positions, context, blocks, norm, embedding_scale=config.hidden_size**0.5)
