"""OLMo 2 (Team OLMo, 2025).

Its norms come behind attention and the feed-forward networks, before their updates are added to the stream; nothing is
normalised in front of them. Queries and keys are normalised over all heads together.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.layers.attention import Attention, attend_and_project
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, PagedKV, StepContext
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


class Olmo2Attention(Attention):
    """Self-attention of a stream that is not normalised, with norms of all queries and of all keys together."""

    @classmethod
    def build(
        cls, config: ModelConfig, layer: LayerAttention, prefix: str, context: BuildContext, unit_offset: bool = False
    ) -> Self:
        """Extend `Attention.build` by norms over the heads of all queries, and of all keys."""
        built = super().build(config, layer, prefix, context, unit_offset)
        built.q_norm, built.k_norm = (
            RMSNorm.build(heads * config.head_dim, config.rms_norm_eps, context, unit_offset)
            for heads in (config.heads, config.kv_heads)
        )
        return built

    def attend_stream(
        self,
        stream: Tensor,
        step: StepContext,
        state: LayerState,
    ) -> Tensor:
        """Return the update of a stream, both [T, hidden]."""
        assert self.q_norm is not None and self.k_norm is not None and isinstance(state, PagedKV)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projected = self.qkv.adapted(step.batch.adapters).apply(stream)
        query, _ = self.q_norm(projected[:, :width].contiguous(), None)
        key, _ = self.k_norm(projected[:, width : width + kv_width].contiguous(), None)
        value = projected[:, width + kv_width :]
        qkv = torch.cat((query, key, value), dim=-1).view(len(stream), -1, self.head_dim)
        rotation = Rotation(*step.rotary[self.layer.rotary], step.batch.slot_mapping[self.layer.group])
        given = (qkv, rotation, step.batch, state.keys, state.values, self.layer, self.output, self.kernels)
        return attend_and_project(*given, state.scales)


@dataclass(slots=True, eq=False)
class Olmo2Block:
    """One block: attention and a feed-forward network.

    Each is followed by a norm and added to the residual stream.
    """

    attention: Olmo2Attention
    attention_norm: RMSNorm
    mlp: GatedMLP
    mlp_norm: RMSNorm

    @classmethod
    def build(cls, config: ModelConfig, index: int, context: BuildContext) -> "Olmo2Block":
        """Allocate the block of a layer without weights."""
        prefix = layer_prefix(index)
        return cls(
            Olmo2Attention.build(config, config.attention[index], f"{prefix}self_attn.", context),
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
