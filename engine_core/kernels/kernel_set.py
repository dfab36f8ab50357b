"""Implementations of a model's fused operations, chosen once when it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, Pieces, TokenRows
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference import delta_rule, layer, lora, moe, quantized_activation


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Fused operations of a transformer layer.

    Signatures and semantics are those of `kernels.reference.layer`, `kernels.reference.quantized_activation`,
    `kernels.reference.moe`, `kernels.reference.delta_rule` and `kernels.reference.lora`.
    """

    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
    norm_add_rms_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
    gather_columns: Callable[[Tensor, Tensor], Tensor]
    rope_and_kv_write: Callable[
        [
            Tensor,
            Tensor,
            Tensor,
            Tensor,
            Tensor,
            Tensor,
            Tensor | None,
            Tensor | None,
            float,
            Tensor | None,
            bool,
            bool,
        ],
        Tensor,
    ]
    """Includes QK norms, if the model has them, and the scales of an 8-bit pool."""
    gated_activation: Callable[[Tensor, Activation], Tensor]
    soft_cap: Callable[[Tensor, float], Tensor]
    quantize: Callable[[Tensor, ActivationFormat], QuantizedActivation]
    quantized_norm: Callable[
        [Tensor, Tensor | None, Tensor | None, Tensor, float, ActivationFormat], tuple[QuantizedActivation, Tensor]
    ]
    quantized_gate: Callable[[Tensor, Activation, ActivationFormat], QuantizedActivation]
    norm_and_route: Callable[
        [
            Tensor,
            Tensor,
            Tensor,
            float,
            Tensor,
            int,
            Routing,
            Tensor,
            Tensor | None,
            int,
            ActivationFormat | None,
            bool,
            bool,
        ],
        tuple[Tensor, Tensor, Routed, QuantizedActivation | None],
    ]
    find_pieces: Callable[[TokenRows], Pieces | None]
    short_conv: Callable[[Tensor, Tensor, DeltaRuleShape, DeltaRuleState, TokenRows, Any], Tensor]
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, DeltaRuleShape, DeltaRuleState, TokenRows, Any], Tensor]
    """The last argument of both is the result of `find_pieces`."""
    gated_norm: Callable[[Tensor, Tensor, Tensor, float, TokenRows], Tensor]
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor]
    group_tokens: Callable[[Tensor, int], AdapterTokens]
    add_lora: Callable[[Tensor, Tensor, AdapterTokens, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]


def torch_kernels() -> KernelSet:
    """Return the oracles, which run on any device."""
    return KernelSet(
        layer.rms_norm,
        layer.add_rms_norm,
        layer.norm_add_rms_norm,
        layer.gather_columns,
        layer.qk_norm_rope_and_kv_write,
        layer.gated_activation,
        layer.soft_cap,
        quantized_activation.quantize,
        quantized_activation.quantized_norm,
        quantized_activation.quantized_gate,
        moe.norm_and_route,
        delta_rule.find_pieces,
        delta_rule.short_conv,
        delta_rule.delta_rule,
        delta_rule.gated_norm,
        delta_rule.sigmoid_gate,
        lora.group_tokens,
        lora.add_lora,
    )


def triton_kernels(pdl: bool) -> KernelSet:
    """Return the Triton kernels, one launch per operation.

    pdl: use programmatic dependent launch, which overlaps a kernel's prologue with its predecessor's end.
    """
    from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
    from tandem.engine_core.kernels.delta_rule.delta_rule import delta_rule
    from tandem.engine_core.kernels.delta_rule.gates import gated_norm, sigmoid_gate
    from tandem.engine_core.kernels.delta_rule.pieces import find_pieces
    from tandem.engine_core.kernels.delta_rule.short_conv import short_conv
    from tandem.engine_core.kernels.gated_activation import gated_activation, quantized_gate
    from tandem.engine_core.kernels.gather_columns import gather_columns
    from tandem.engine_core.kernels.lora.group_tokens import group_tokens
    from tandem.engine_core.kernels.lora.shrink_expand import add_lora
    from tandem.engine_core.kernels.moe.route import norm_and_route
    from tandem.engine_core.kernels.norm import add_rms_norm, norm_add_rms_norm, quantized_norm, rms_norm
    from tandem.engine_core.kernels.quantize import quantize
    from tandem.engine_core.kernels.soft_cap import soft_cap

    return KernelSet(
        partial(rms_norm, pdl=pdl),
        partial(add_rms_norm, pdl=pdl),
        partial(norm_add_rms_norm, pdl=pdl),
        partial(gather_columns, pdl=pdl),
        partial(rope_and_kv_write, pdl=pdl),
        partial(gated_activation, pdl=pdl),
        partial(soft_cap, pdl=pdl),
        partial(quantize, pdl=pdl),
        partial(quantized_norm, pdl=pdl),
        partial(quantized_gate, pdl=pdl),
        partial(norm_and_route, pdl=pdl),
        partial(find_pieces, pdl=pdl),
        partial(short_conv, pdl=pdl),
        partial(delta_rule, pdl=pdl),
        partial(gated_norm, pdl=pdl),
        partial(sigmoid_gate, pdl=pdl),
        partial(group_tokens, pdl=pdl),
        partial(add_lora, pdl=pdl),
    )
