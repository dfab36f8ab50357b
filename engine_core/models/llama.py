"""Llama (Touvron et al., 2023), versions 1 to 3.

Models that share its architecture, such as TinyLlama, are included.
"""

from typing import ClassVar

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count


class LlamaFields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    default_end: ClassVar[int] = 2
    max_position_embeddings: Count = 2048
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    mlp_bias: bool = False


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(LlamaFields)
    head_dim = fields.head_dim or fields.hidden_per_head
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5)] * fields.num_hidden_layers,
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        mlp_bias=fields.mlp_bias,
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [PreNormBlock.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)
