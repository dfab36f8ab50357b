"""Qwen3-Next (Qwen Team, 2025): the hybrid with a mixture of experts that Qwen 3.5 continues.

Projections of the delta rule are fused and grouped by key head in the checkpoint, and some layers may be dense.
"""

from msgspec import field

from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.hybrid_block import HybridBlock
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.hybrid_fields import HybridMoEFields, resolve_hybrid
from tandem.engine_core.rope_config import Count


class Qwen3NextFields(HybridMoEFields, kw_only=True):
    """The fields of config.json that this family reads."""

    intermediate_size: Count = 5632
    num_key_value_heads: Count | None = 2
    num_experts_per_tok: Count = 10
    num_experts: Count = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    """Every how many layers there is a mixture of experts."""
    mlp_only_layers: list[int] | None = field(default_factory=list)
    """Indices of further layers without one."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Qwen3NextFields)
    dense, step = set(fields.mlp_only_layers or ()), fields.decoder_sparse_step
    sparse = [index for index in range(fields.num_hidden_layers) if index not in dense and (index + 1) % step == 0]
    routing = Routing.TOP_K_SOFTMAX if fields.norm_topk_prob else Routing.SOFTMAX
    return resolve_hybrid(source, fields, moe=fields.moe(sparse, routing))


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    switch = RoutingSwitch.build(context.device)
    blocks = []
    for index in range(config.layers):
        mlp = None
        if config.moe is not None and index in config.moe.layers:
            mlp = MixtureOfExperts.build(config, config.moe, index, switch, context)
        blocks.append(HybridBlock.build(config, index, context, mlp, is_grouped=True))
    norm = RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)
    return Decoder.build(config, max_positions, context, blocks, norm, routing=switch)
