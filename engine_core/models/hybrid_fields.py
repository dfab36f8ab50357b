"""The config.json fields of hybrids of attention and Gated DeltaNet (Yang et al., 2025).

Attention has norms of each query and key head, turns a quarter of each head, and its output is multiplied by a gate.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.model_config import ModelConfig, MoEConfig
from tandem.engine_core.models.config_fields import ConfigFields, ConfigSource
from tandem.engine_core.rope_config import FULL, Count, Positive

RECURRENT = "linear_attention"
_POSITIONS_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Rotary fields that concern images: the three positions of a text token are equal, which makes it plain RoPE."""


class HybridFields(ConfigFields, kw_only=True):
    """The fields of config.json that all hybrids read.

    Defaults are those that Qwen 3.5 and Qwen3-Next share.
    """

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

        Raises ConfigError for malformed `layer_types`, and for a model without attention.
        """
        layers = self.num_hidden_layers
        if self.layer_types is None:
            if self.full_attention_interval > layers:
                raise ConfigError(
                    f"full_attention_interval {self.full_attention_interval} is more than num_hidden_layers {layers}: "
                    "a model without attention is not supported"
                )
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


class HybridMoEFields(HybridFields, kw_only=True):
    """The fields of config.json that hybrids with a mixture of experts read too."""

    num_experts_per_tok: Count
    num_experts: Count
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512

    def moe(self, layers: Iterable[int], routing: Routing = Routing.TOP_K_SOFTMAX) -> MoEConfig | None:
        """Return the mixture of experts of some layers, None if there are none.

        Raises ConfigError for more experts of a token than there are.
        """
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {self.num_experts}"
            )
        sparse = frozenset(layers)
        if not sparse:
            return None
        return MoEConfig(
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            routing=routing,
            layers=sparse,
            shared_width=self.shared_expert_intermediate_size,
        )


def resolve_hybrid(source: ConfigSource, fields: HybridFields, **own: Any) -> ModelConfig:
    """Build the `ModelConfig` of a hybrid.

    own: as in `ConfigSource.resolve`. Raises ConfigError for values that are not supported.
    """
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
        **own,
    )


def _of_text(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if rope is None else {name: rope[name] for name in rope if name not in _POSITIONS_OF_IMAGES}
