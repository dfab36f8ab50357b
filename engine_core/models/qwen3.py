"""Qwen 3 (Yang et al., 2025), the dense models.

It is Llama's decoder with norms of each query and key head, and a head size that does not follow from the hidden size.
The upper layers may have a sliding window.
"""

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.sliding_fields import SlidingFields
from tandem.engine_core.rope_config import Count

HEAD_DIM = 128
"""Head size of a config.json that names none."""


class Qwen3Fields(SlidingFields, kw_only=True):
    """The fields of config.json that this family reads."""

    max_position_embeddings: Count = 32768
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Qwen3Fields)
    head_dim = fields.head_dim or HEAD_DIM
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, window) for window in fields.windows()],
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qk_norm=True,
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [PreNormBlock.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)
