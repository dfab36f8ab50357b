"""OLMoE (Muennighoff et al., 2024): a mixture of experts in each layer, with norms over all queries and all keys."""

from typing import ClassVar

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.joint_norm_attention import JointNormAttention
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig, MoEConfig, layer_prefix
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count, Positive


class OlmoeFields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    default_end: ClassVar[int] = 50279
    max_position_embeddings: Count = 4096
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    clip_qkv: Positive | None = None
    """Maximum absolute value of queries, keys and values."""
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    """Another name of `num_experts`."""
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(OlmoeFields)
    head_dim = fields.head_dim or fields.hidden_per_head
    experts, layers = fields.num_experts or fields.num_local_experts or 64, fields.num_hidden_layers
    if fields.num_experts_per_tok > experts:
        raise ConfigError(f"num_experts_per_tok {fields.num_experts_per_tok} is more than num_experts {experts}")
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5)] * layers,
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qkv_clip=fields.clip_qkv,
        moe=MoEConfig(
            experts=experts,
            top_k=fields.num_experts_per_tok,
            width=fields.intermediate_size,
            routing=Routing.TOP_K_SOFTMAX if fields.norm_topk_prob else Routing.SOFTMAX,
            layers=frozenset(range(layers)),
        ),
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    assert config.moe is not None
    switch = RoutingSwitch.build(context.device)
    blocks = []
    for index in range(config.layers):
        attention, mlp = (RMSNorm.build(config.hidden_size, config.rms_norm_eps, context) for _ in range(2))
        prefix = layer_prefix(index)
        own = JointNormAttention.build(config, config.attention[index], f"{prefix}self_attn.", context)
        experts = MixtureOfExperts.build(config, config.moe, index, switch, context)
        blocks.append(PreNormBlock(attention, own, mlp, experts))
    return Decoder.build(config, max_positions, context, blocks, routing=switch)
