"""Qwen 2 and 2.5 (Yang et al., 2024).

It is Llama's decoder with biases of queries, keys and values, and none of the output of attention. The upper layers may
have a sliding window.
"""

import logging
from typing import Any

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.sliding_fields import SlidingFields
from tandem.engine_core.rope_config import Count

logger = logging.getLogger(__name__)


class Qwen2Fields(SlidingFields, kw_only=True):
    """The fields of config.json that this family reads."""

    max_position_embeddings: Count = 32768
    dual_chunk_attention_config: dict[str, Any] | None = None
    """How the models of a million positions turn keys that are far away, which transformers does not do either."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Qwen2Fields)
    head_dim = fields.head_dim or fields.hidden_per_head
    if fields.dual_chunk_attention_config is not None:
        trained = fields.dual_chunk_attention_config.get("original_max_position_embeddings")
        logger.warning(
            "dual chunk attention is not computed, as in transformers: answers to contexts beyond the %s positions "
            "that the model was trained with get worse; --max-len keeps requests within them",
            trained,
        )
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, window) for window in fields.windows()],
        ropes=[fields.rope(head_dim)],
        qkv_bias=True,
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [PreNormBlock.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)
