"""Qwen 3.5 and 3.6 mixtures of experts, such as Qwen3.6-35B-A3B.

They are the dense Qwen 3.5 with a mixture of experts in all layers, and an expert that all tokens use.
"""

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.hybrid_block import HybridBlock
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.hybrid_fields import HybridMoEFields, resolve_hybrid
from tandem.engine_core.rope_config import Count


class Qwen35MoeFields(HybridMoEFields, kw_only=True):
    """The fields of config.json that this family reads."""

    intermediate_size: Count = 5632
    """Not used: no layer is dense."""
    num_key_value_heads: Count | None = 2
    num_experts_per_tok: Count = 8
    num_experts: Count = 256


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Qwen35MoeFields)
    return resolve_hybrid(source, fields, moe=fields.moe(range(fields.num_hidden_layers)))


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    assert config.moe is not None
    switch = RoutingSwitch.build(context.device)
    blocks = []
    for index in range(config.layers):
        mlp = MixtureOfExperts.build(config, config.moe, index, switch, context)
        blocks.append(HybridBlock.build(config, index, context, mlp))
    norm = RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)
    return Decoder.build(config, max_positions, context, blocks, norm, routing=switch)
