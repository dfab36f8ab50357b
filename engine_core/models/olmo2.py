"""OLMo 2 (Team OLMo, 2025).

Its norms come behind attention and the feed-forward networks, before their updates are added to the stream; nothing is
normalised in front of them. Queries and keys are normalised over all heads together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, LayerAttention
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.attention import attend_and_project
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig
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
    """Return the facts of a model from its config.json."""
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
class Olmo2Attention:
    """Self-attention with norms of all queries and of all keys together."""

    qkv: LinearWeights
    output: LinearWeights
    q_norm: RMSNorm
    k_norm: RMSNorm
    heads: int
    kv_heads: int
    head_dim: int
    layer: LayerAttention
    kernels: KernelSet

    @classmethod
    def build(cls, config: ModelConfig, layer: LayerAttention, context: BuildContext) -> "Olmo2Attention":
        """Allocate a part whose weights are not filled yet.

        layer: its entry of `ModelConfig.attention`.
        """
        heads, kv_heads, head_dim, hidden = config.heads, config.kv_heads, config.head_dim, config.hidden_size
        linear = context.linear_method
        return cls(
            linear.build((heads + 2 * kv_heads) * head_dim, hidden, config.qkv_bias, context),
            linear.build(hidden, heads * head_dim, config.output_bias, context),
            RMSNorm.build(heads * head_dim, config.rms_norm_eps, context),
            RMSNorm.build(kv_heads * head_dim, config.rms_norm_eps, context),
            heads,
            kv_heads,
            head_dim,
            layer,
            context.kernels,
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        rotary: Sequence[tuple[Tensor, Tensor]],
        batch: ForwardBatch,
        keys: Tensor,
        values: Tensor,
        scales: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, both [T, hidden].

        rotary, keys, values, scales: those of `Attention.__call__`.
        """
        stream = update if residual is None else residual + update
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projected = self.qkv.apply(stream)
        query, _ = self.q_norm(projected[:, :width].contiguous(), None)
        key, _ = self.k_norm(projected[:, width : width + kv_width].contiguous(), None)
        value = projected[:, width + kv_width :]
        qkv = torch.cat((query, key, value), dim=-1).view(len(stream), -1, self.head_dim)
        rotation = Rotation(*rotary[self.layer.rotary], batch.slot_mapping)
        given = (qkv, rotation, batch, keys, values, self.layer, self.output, self.kernels, scales)
        return attend_and_project(*given), stream

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        kv_width = self.kv_heads * self.head_dim
        parts = {"q_proj": self.heads * self.head_dim, "k_proj": kv_width, "v_proj": kv_width}
        return [
            *self.qkv.slots(prefix, "qkv_proj", parts),
            *self.output.slots(prefix, "o_proj"),
            *self.q_norm.slots(f"{prefix}q_norm"),
            *self.k_norm.slots(f"{prefix}k_norm"),
        ]


@dataclass(slots=True, eq=False)
class Olmo2MLP:
    """Gated feed-forward network without a norm before it."""

    gate_up: LinearWeights
    down: LinearWeights
    width: int
    activation: Activation
    kernels: KernelSet

    @classmethod
    def build(cls, config: ModelConfig, context: BuildContext) -> "Olmo2MLP":
        """Allocate a network whose weights are not filled yet."""
        width, hidden, linear = config.intermediate_size, config.hidden_size, context.linear_method
        gate_up = linear.build(2 * width, hidden, False, context)
        down = linear.build(hidden, width, False, context)
        down.reorder_producer(gate_up)
        return cls(gate_up, down, width, config.activation, context.kernels)

    def __call__(self, update: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, both [T, hidden]."""
        stream = residual + update
        hidden = self.kernels.gated_activation(self.gate_up.apply(stream), self.activation)
        return self.down.apply(hidden), stream

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        parts = {"gate_proj": self.width, "up_proj": self.width}
        return self.gate_up.slots(prefix, "gate_up_proj", parts) + self.down.slots(prefix, "down_proj")


@dataclass(slots=True, eq=False)
class Olmo2Block:
    """One block: attention and a feed-forward network.

    Each is followed by a norm and added to the residual stream.
    """

    attention: Olmo2Attention
    attention_norm: RMSNorm
    mlp: Olmo2MLP
    mlp_norm: RMSNorm

    @classmethod
    def build(cls, config: ModelConfig, layer: LayerAttention, context: BuildContext) -> "Olmo2Block":
        """Allocate a block whose weights are not filled yet.

        layer: the block's entry of `ModelConfig.attention`.
        """
        return cls(
            Olmo2Attention.build(config, layer, context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
            Olmo2MLP.build(config, context),
            RMSNorm.build(config.hidden_size, config.rms_norm_eps, context),
        )

    def __call__(
        self,
        update: Tensor,
        residual: Tensor | None,
        rotary: Sequence[tuple[Tensor, Tensor]],
        batch: ForwardBatch,
        keys: Tensor,
        values: Tensor,
        scales: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Implement `decoder.Block`."""
        update, residual = self.attention(update, residual, rotary, batch, keys, values, scales)
        update, _ = self.attention_norm(update, None)
        update, residual = self.mlp(update, residual)
        update, _ = self.mlp_norm(update, None)
        return update, residual

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        return [
            *self.attention.slots(f"{prefix}self_attn."),
            *self.attention_norm.slots(f"{prefix}post_attention_layernorm"),
            *self.mlp.slots(f"{prefix}mlp."),
            *self.mlp_norm.slots(f"{prefix}post_feedforward_layernorm"),
        ]


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model whose weights are not filled yet."""
    blocks = [Olmo2Block.build(config, layer, context) for layer in config.attention]
    return Decoder.build(config, max_positions, context, blocks)
