"""Ministral 3 and Devstral Small 2 (Mistral AI, 2025).

Llama's decoder without biases, with YaRN. Queries beyond the original context are scaled by their position, as in
Llama 4.
"""

from typing import Any, ClassVar

import msgspec

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource, Layers
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count, Positive, QueryScaling

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary fields of a config.json without any."""


class Ministral3Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    vocab_size: Count = 131_072
    hidden_size: Count = 4096
    intermediate_size: Count = 14_336
    num_hidden_layers: Layers = 34
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    default_end: ClassVar[int] = 2
    max_position_embeddings: Count = 262_144
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = None
    """Positions that a query sees; null: all before it."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Ministral3Fields)
    head_dim = fields.head_dim or fields.hidden_per_head
    rope = dict(fields.rope_scaling or fields.rope_parameters or DEFAULT_ROPE)
    original = fields.original_max_position_embeddings or rope.get("original_max_position_embeddings")
    scaling = _query_scaling(rope.pop("llama_4_scaling_beta", None), original)
    rope.pop("max_position_embeddings", None)
    fields = msgspec.structs.replace(fields, rope_scaling=None, rope_parameters=rope)
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, fields.sliding_window)] * fields.num_hidden_layers,
        ropes=[fields.rope(head_dim)],
        query_scaling=scaling,
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [PreNormBlock.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)


def _query_scaling(beta: Any, original: Any) -> QueryScaling | None:
    """Read the scaling of queries.

    beta: the field `llama_4_scaling_beta`; original: the field `original_max_position_embeddings`, the one of
    the top level if there are two.
    """
    if beta is None:
        return None
    try:
        return msgspec.convert({"beta": beta, "original_positions": original}, QueryScaling)
    except msgspec.ValidationError:
        raise ConfigError(
            f"rope_parameters: llama_4_scaling_beta is {beta} with original_max_position_embeddings {original}; it "
            "needs a number and a positive number of positions"
        ) from None
