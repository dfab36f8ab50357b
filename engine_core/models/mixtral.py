"""Mixtral (Jiang et al., 2024): Mistral's decoder with a mixture of experts in each layer."""

from typing import ClassVar

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig, MoEConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Base, Count, Positive


class MixtralFields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    default_end: ClassVar[int] = 2
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 4096 * 32
    rms_norm_eps: Positive = 1e-5
    rope_theta: Base | None = 1e6
    sliding_window: Count | None = None
    """Window of all layers, if set."""
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(MixtralFields)
    head_dim = fields.head_dim or fields.hidden_per_head
    experts, top_k, layers = fields.num_local_experts, fields.num_experts_per_tok, fields.num_hidden_layers
    if top_k > experts:
        raise ConfigError(f"num_experts_per_tok {top_k} is more than num_local_experts {experts}")
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, fields.sliding_window)] * layers,
        ropes=[fields.rope(head_dim)],
        moe=MoEConfig(
            experts=experts,
            top_k=top_k,
            width=fields.intermediate_size,
            routing=Routing.TOP_K_SOFTMAX,
            layers=frozenset(range(layers)),
            module="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    assert config.moe is not None
    switch = RoutingSwitch.build(context.device)
    blocks = []
    for index in range(config.layers):
        mlp = MixtureOfExperts.build(config, config.moe, index, switch, context)
        blocks.append(PreNormBlock.build(config, index, context, mlp, config.moe.module))
    return Decoder.build(config, max_positions, context, blocks, routing=switch)
