"""Qwen 3 mixtures of experts (Yang et al., 2025), such as Qwen3-30B-A3B and Qwen3-Coder-30B-A3B.

It is the dense Qwen 3 with a mixture of experts in all layers or some of them.
"""

from msgspec import field

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.pre_norm_block import PreNormBlock
from tandem.engine_core.model_config import ModelConfig, MoEConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count


class Qwen3MoeFields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    max_position_embeddings: Count = 32768
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    """Window of all layers, if enabled."""
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    """Another name of `num_experts`, which newer versions of transformers write."""
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    """Every how many layers there is a mixture of experts."""
    mlp_only_layers: list[int] | None = field(default_factory=list)
    """Indices of further layers without one."""

    def moe(self) -> MoEConfig | None:
        """Return the mixture of experts, None if all layers are dense.

        Raises ConfigError for more experts of a token than there are.
        """
        dense = set(self.mlp_only_layers or ())
        step, layers = self.decoder_sparse_step, range(self.num_hidden_layers)
        sparse = frozenset(index for index in layers if index not in dense and (index + 1) % step == 0)
        experts = self.num_experts or self.num_local_experts or 128
        if self.num_experts_per_tok > experts:
            raise ConfigError(f"num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {experts}")
        routing = Routing.TOP_K_SOFTMAX if self.norm_topk_prob else Routing.SOFTMAX
        if not sparse:
            return None
        return MoEConfig(
            experts=experts,
            top_k=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            routing=routing,
            layers=sparse,
        )


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Qwen3MoeFields)
    head_dim = fields.head_dim or fields.hidden_per_head
    window = fields.sliding_window if fields.use_sliding_window else None
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5, window)] * fields.num_hidden_layers,
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qk_norm=True,
        moe=fields.moe(),
    )


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    switch = RoutingSwitch.build(context.device)
    blocks = []
    for index in range(config.layers):
        mlp = None
        if config.moe is not None and index in config.moe.layers:
            mlp = MixtureOfExperts.build(config, config.moe, index, switch, context)
        blocks.append(PreNormBlock.build(config, index, context, mlp))
    return Decoder.build(config, max_positions, context, blocks, routing=switch)
