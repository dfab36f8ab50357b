"""Mistral (Jiang et al., 2023), with the sliding window of version 0.1.

Mistral Nemo, Mistral Small and Ministral 8B are included. Llama's decoder without biases, optionally with
sliding-window attention in all layers.
"""

from typing import ClassVar

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count


class MistralFields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    default_end: ClassVar[int] = 2
    max_position_embeddings: Count = 4096 * 32
    num_key_value_heads: Count | None = 8
    sliding_window: Count | None = 4096
    """Positions that a query sees; null, in versions from 0.2 on: all before it."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(MistralFields)
    head_dim = fields.head_dim or fields.hidden_per_head
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, fields.sliding_window)] * fields.num_hidden_layers,
        ropes=[fields.rope(head_dim)],
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [PreNormBlock.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)
