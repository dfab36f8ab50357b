"""OLMo 2 (Team OLMo, 2025).

Its norms come behind attention and the feed-forward networks, before their updates are added to the stream; nothing is
normalised in front of them. Queries and keys are normalised over all heads together.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.joint_norm_attention import JointNormAttention
from tandem.engine_core.layers.layer_state import LayerState, StepContext
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, layer_prefix
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import Count, Positive


class Olmo2Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    default_end: ClassVar[int] = 50279
    max_position_embeddings: Count = 2048
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Olmo2Fields)
    head_dim = fields.head_dim or fields.hidden_per_head
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5)] * fields.num_hidden_layers,
        ropes=[fields.rope(head_dim)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
    )


@dataclass(slots=True, eq=False)
class Olmo2Block:
    """One block: attention and a feed-forward network.

    Each is followed by a norm and added to the residual stream.
    """

    attention: JointNormAttention
    attention_norm: RMSNorm
    mlp: GatedMLP
    mlp_norm: RMSNorm

    @classmethod
    def build(cls, config: ModelConfig, index: int, context: BuildContext) -> "Olmo2Block":
        """Allocate the block of a layer without weights."""
        prefix = layer_prefix(index)
        return cls(
            JointNormAttention.build(config, config.attention[index], f"{prefix}self_attn.", context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            GatedMLP.build(config, f"{prefix}mlp.", context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        step: StepContext,
        state: LayerState,
    ) -> tuple[Tensor, Tensor]:
        """Implement `decoder.Block`."""
        stream = update if residual is None else residual + update
        update, _ = self.attention_norm(self.attention.attend_stream(stream, step, state), None)
        stream = stream + update
        update, _ = self.mlp_norm(self.mlp.apply(stream, step.batch.adapters), None)
        return update, stream

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        return [
            *self.attention.slots(f"{prefix}self_attn."),
            *self.attention_norm.slots(f"{prefix}post_attention_layernorm"),
            *self.mlp.slots(f"{prefix}mlp."),
            *self.mlp_norm.slots(f"{prefix}post_feedforward_layernorm"),
        ]


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [Olmo2Block.build(config, index, context) for index in range(config.layers)]
    return Decoder.build(config, max_positions, context, blocks)
