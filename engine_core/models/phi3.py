"""Phi-3 (Abdin et al., 2024), Phi-3.5-mini, Phi-4 and Phi-4-mini.

It is Llama's decoder without biases, with fused projections in the checkpoint. Of each head of Phi-4-mini three
quarters turn. Versions for long contexts have LongRoPE, and some have a sliding window.
"""

from typing import ClassVar

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count, Positive


class Phi3Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    default_end: ClassVar[int] = 32000
    max_position_embeddings: Count = 4096
    original_max_position_embeddings: Count | None = 4096
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = None
    """Positions that a query sees; null: all before it."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Phi3Fields)
    head_dim = fields.head_dim or fields.hidden_per_head
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, fields.sliding_window)] * fields.num_hidden_layers,
        # The first checkpoints call LongRoPE "su" or even "yarn".
        ropes=[fields.rope(head_dim, partial=True, longrope_names=("su", "yarn"))],
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [PreNormBlock.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)
