"""Qwen 3.5, 3.6 and 3.8, the dense models: hybrids of attention and Gated DeltaNet (Yang et al., 2025).

Three of four layers have a gated delta rule in place of attention. Attention has norms of each query and key head,
turns a quarter of each head, and its output is multiplied by a gate. All norms but that of the delta rule multiply by 1
plus the stored weight.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from msgspec import structs
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.attention import attend
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.delta_rule import DeltaRule
from tandem.engine_core.layers.layer_state import LayerState, PagedKV, StepContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig, layer_prefix
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.rope_config import FULL, Count, Positive

RECURRENT = "linear_attention"
_POSITIONS_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Rotary fields that concern images: the three positions of a text token are equal, which makes it plain RoPE."""


class Qwen35Fields(ConfigFields, kw_only=True):
    """The fields of config.json that this family reads."""

    max_position_embeddings: Count = 32768
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    partial_rotary_factor: Positive | None = 0.25
    attention_bias: bool = False
    """True if all projections of attention, the output's included, have biases."""
    attn_output_gate: bool = True
    output_gate_type: str = "swish"
    """Activation of the gate of the delta rule."""
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4
    """Every this many layers one has attention, if there are no `layer_types`."""
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32

    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the indexes of the layers without attention.

        Raises ConfigError for malformed `layer_types`.
        """
        layers = self.num_hidden_layers
        if self.layer_types is None:
            return tuple(index for index in range(layers) if (index + 1) % self.full_attention_interval)
        if unknown := sorted(set(self.layer_types) - {FULL, RECURRENT}):
            raise ConfigError(f"layer_types {', '.join(unknown)} are not supported, only {FULL} and {RECURRENT}")
        if len(self.layer_types) != layers:
            raise ConfigError(f"layer_types has {len(self.layer_types)} entries for {layers} layers")
        if FULL not in self.layer_types:
            raise ConfigError(f"layer_types has no {FULL}; a model without any is not supported")
        return tuple(index for index, kind in enumerate(self.layer_types) if kind == RECURRENT)

    def delta_rule(self) -> DeltaRuleShape:
        """Return the sizes of the recurrent layers.

        Raises ConfigError for sizes that do not fit each other.
        """
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.linear_num_key_heads}"
            )
        if self.linear_conv_kernel_dim < 2:
            raise ConfigError(f"linear_conv_kernel_dim {self.linear_conv_kernel_dim} is below 2")
        return DeltaRuleShape(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
        )


def read_config(source: ConfigSource) -> ModelConfig:
    """Return the `ModelConfig` of a config.json."""
    fields = source.read(Qwen35Fields)
    scaling, parameters = _of_text(fields.rope_scaling), _of_text(fields.rope_parameters)
    fields = structs.replace(fields, rope_scaling=scaling, rope_parameters=parameters)
    for name, value, known in (
        ("attn_output_gate", fields.attn_output_gate, True),
        ("output_gate_type", fields.output_gate_type, "swish"),
        ("hidden_act", fields.hidden_act, "silu"),
    ):
        if value != known:
            raise ConfigError(f"{name} {value} is not supported, only {known}")
    head_dim = fields.head_dim or fields.hidden_per_head
    return source.resolve(
        fields,
        head_dim=head_dim,
        attention=[LayerAttention(head_dim**-0.5)] * fields.num_hidden_layers,
        ropes=[fields.rope(head_dim, partial=True)],
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qk_norm=True,
        output_gate=True,
        recurrent_layers=fields.recurrent_layers(),
        delta_rule=fields.delta_rule(),
    )


def _of_text(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if rope is None else {name: rope[name] for name in rope if name not in _POSITIONS_OF_IMAGES}


@dataclass(eq=False)
class GatedAttention:
    """Attention with a gate for each element of its output, from the same projection as the query."""

    qkv: LinearWeights
    """Outputs of each head: query and gate; then the keys of all heads, then the values."""
    output: LinearWeights
    heads: int
    kv_heads: int
    head_dim: int
    layer: LayerAttention
    kernels: KernelSet
    q_norm: RMSNorm
    k_norm: RMSNorm

    @classmethod
    def build(cls, config: ModelConfig, layer: LayerAttention, prefix: str, context: BuildContext) -> Self:
        """Allocate a layer without weights. prefix: as in `Attention.build`."""
        heads, kv_heads, head_dim, hidden = config.heads, config.kv_heads, config.head_dim, config.hidden_size
        parts = _parts(heads * head_dim, kv_heads * head_dim)
        return cls(
            context.linear(f"{prefix}qkv_proj", sum(parts.values()), hidden, config.qkv_bias, parts),
            context.linear(f"{prefix}o_proj", hidden, heads * head_dim, config.output_bias),
            heads,
            kv_heads,
            head_dim,
            layer,
            context.kernels,
            *(RMSNorm.build(head_dim, config.rms_norm_eps, context, unit_offset=True) for _ in range(2)),
        )

    def __call__(
        self, update: Tensor, residual: Tensor | None, norm: Norm, step: StepContext, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, as `Attention` does."""
        assert isinstance(state, PagedKV)
        projected, residual = self.qkv.adapted(step.batch.adapters).apply_normed(update, residual, norm)
        heads = projected.view(len(update), -1, self.head_dim)
        query, gate = (heads[:, part : 2 * self.heads : 2] for part in range(2))
        qkv = torch.cat((query, heads[:, 2 * self.heads :]), 1)
        rotation = Rotation(
            *step.rotary[self.layer.rotary],
            step.batch.slot_mapping[self.layer.group],
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
        )
        attended = attend(qkv, rotation, step.batch, state.keys, state.values, self.layer, self.kernels, state.scales)
        output = self.output.adapted(step.batch.adapters)
        return output.apply(self.kernels.sigmoid_gate(attended.flatten(1), gate)), residual

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        parts = _parts(self.heads * self.head_dim, self.kv_heads * self.head_dim)
        return [
            *self.qkv.slots(prefix, "qkv_proj", parts),
            *self.output.slots(prefix, "o_proj"),
            *self.q_norm.slots(f"{prefix}q_norm"),
            *self.k_norm.slots(f"{prefix}k_norm"),
        ]


def _parts(width: int, kv_width: int) -> dict[str, int]:
    """Return the outputs of each part of the first projection of attention."""
    return {"q_proj": 2 * width, "k_proj": kv_width, "v_proj": kv_width}


@dataclass(eq=False)
class HybridBlock:
    """Pre-norm block: attention or a delta rule, and a feed-forward network."""

    attention_norm: RMSNorm
    attention: GatedAttention | DeltaRule
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def build(cls, config: ModelConfig, index: int, context: BuildContext) -> "HybridBlock":
        """Allocate the block of a layer without weights."""
        prefix = layer_prefix(index)
        norms = [RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True) for _ in range(2)]
        attention: GatedAttention | DeltaRule
        if index in config.recurrent_layers:
            attention = DeltaRule.build(config, f"{prefix}linear_attn.", context)
        else:
            attention = GatedAttention.build(config, config.attention[index], f"{prefix}self_attn.", context)
        return cls(norms[0], attention, norms[1], GatedMLP.build(config, f"{prefix}mlp.", context))

    def __call__(
        self, update: Tensor, residual: Tensor | None, step: StepContext, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Implement `decoder.Block`."""
        update, residual = self.attention(update, residual, self.attention_norm, step, state)
        return self.mlp(update, residual, self.mlp_norm, adapters=step.batch.adapters)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors."""
        name = "linear_attn." if isinstance(self.attention, DeltaRule) else "self_attn."
        return [
            *self.attention_norm.slots(f"{prefix}input_layernorm"),
            *self.attention.slots(f"{prefix}{name}"),
            *self.mlp_norm.slots(f"{prefix}post_attention_layernorm"),
            *self.mlp.slots(f"{prefix}mlp."),
        ]


def build(config: ModelConfig, max_positions: int, context: BuildContext) -> Decoder:
    """Allocate a model without weights."""
    blocks = [HybridBlock.build(config, index, context) for index in range(config.layers)]
    norm = RMSNorm.build(config.hidden_size, config.rms_norm_eps, context, unit_offset=True)
    return Decoder.build(config, max_positions, context, blocks, norm)
