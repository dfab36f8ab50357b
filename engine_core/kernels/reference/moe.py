"""A mixture of experts in plain torch: the oracle of `kernels.moe`, and the CPU implementation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.moe.routing import Routed, Routing, SharedOutput
from tandem.engine_core.kernels.moe.scales import SCALE_BLOCK
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference.layer import add_rms_norm, gated_activation
from tandem.engine_core.kernels.reference.quantized_activation import quantize

MIN_ROWS = 4
"""Minimum number of rows of a matmul. The rounding of a row of a small float32 matmul on a CPU does not depend on the
number of rows from here on, if the weights are column-major; see `layers.torch_linear.CpuLinear`."""


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of a router, [T, E] float32.

    x: [T, inputs]; weight: [E, inputs]. Products and sums are float32, whatever the dtypes.
    """
    rows = x.shape[0]
    wide = functional.pad(x.float(), (0, 0, 0, max(0, MIN_ROWS - rows)))
    return functional.linear(wide, weight.float().t().contiguous().t())[:rows]


def uniform_logits(tokens: int, experts: int, seed: int, device: torch.device) -> Tensor:
    """Return the pseudorandom logits of uniform routing, [T, E] float32 in [0, 1).

    The finalizer of MurmurHash3 (Appleby, 2008) of the indices of token and expert.
    """
    full = 0xFFFFFFFF
    index = torch.arange(tokens * experts, device=device)
    bits = ((index * 0x9E3779B1 & full) + (seed * 0x85EBCA77 & full)) & full
    bits = _times(bits ^ (bits >> 16), 0x85EBCA6B)
    bits = _times(bits ^ (bits >> 13), 0xC2B2AE35)
    bits ^= bits >> 16
    return ((bits >> 8).float() * 2.0**-24).view(tokens, experts)


def _times(bits: Tensor, factor: int) -> Tensor:
    """Return the product modulo 2^32, in int64 without overflow. bits: below 2^32."""
    low = bits * (factor & 0xFFFF)
    high = (bits * (factor >> 16) & 0xFFFF) << 16
    return (low + high) & 0xFFFFFFFF


def route(
    logits: Tensor, top_k: int, routing: Routing, rows: Tensor | None = None, gate: Tensor | None = None
) -> Routed:
    """Choose the experts of each token: those of the largest logits, ties to the lowest index, NaN last.

    logits: [T, E] float32; rows: [T], 0 for padding, which is not routed; None: no padding; gate: [T] float32; if
    given, expert E is added to those of each token with the weight sigmoid(gate). The result is not sorted.
    """
    known = torch.where(logits.isnan(), float("-inf"), logits)
    ids = known.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = known.gather(1, ids)
    scores = (chosen - chosen[:, :1]).exp()
    total = scores.sum(-1) if routing.renormalizes else (logits - chosen[:, :1]).exp().sum(-1)
    weights = scores / total[:, None]
    if gate is not None:
        ids = functional.pad(ids, (0, 1), value=logits.shape[1])
        weights = torch.cat((weights, gate.sigmoid()[:, None]), 1)
    ids = ids.int()
    if rows is not None:
        routed = (rows != 0)[:, None]
        ids, weights = torch.where(routed, ids, -1), torch.where(routed, weights, 0.0)
    return Routed(ids, weights)


def norm_and_route(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    top_k: int,
    routing: Routing,
    uniform: Tensor,
    rows: Tensor | None,
    seed: int,
    to: ActivationFormat | None = None,
    sort: bool = True,  # noqa: ARG001
    shared: bool = False,
) -> tuple[Tensor, Tensor, Routed, QuantizedActivation | None]:
    """Add x to the residual stream, normalize it, and choose the experts of each token.

    Returns the normalized sum, the sum, the routing, and the normalized sum in the format `to`, if given. x, residual:
    [T, inputs]; norm_weight: [inputs], see `layer.add_rms_norm`; weight: of the router, [E, inputs]; uniform: [1]
    int32, not 0 for the routing of `uniform_logits` with `seed`, for padding, too; rows: as in `route`; sort:
    whether to list the pairs of each expert, which only kernels do; shared: whether the last row of the weight is the
    gate of an expert that all tokens use.
    """
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    quantized = None if to is None else quantize(normed, to)
    logits, gate = router_logits(normed, weight), None
    if shared:
        logits, gate = logits[:, :-1], logits[:, -1]
    if int(uniform):
        logits, rows = uniform_logits(x.shape[0], logits.shape[1], seed, x.device), None
    return normed, total, route(logits, top_k, routing, rows, gate), quantized


def sort_pairs(routed: Routed, experts: int) -> Routed:
    """Return the routing with the pairs of each expert, in the order of tokens."""
    flat = routed.ids.flatten()
    pairs = torch.zeros(experts, routed.ids.shape[0], dtype=torch.int32, device=flat.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=flat.device)
    for expert in range(experts):
        own = (flat == expert).nonzero().flatten()
        counts[expert] = len(own)
        pairs[expert, : len(own)] = own.int()
    return Routed(routed.ids, routed.weights, counts, pairs)


def dequantize_part(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weights of one part of an expert, [outputs, inputs].

    values: [outputs, inputs]; scales: the part's, as in `moe.scales`, None for 16-bit weights.
    """
    if scales is None:
        return values
    wide = values.float()
    if scales.ndim == 1:
        return (wide * scales[:, None]).to(dtype)
    spread = scales.repeat_interleave(SCALE_BLOCK, 0)[: values.shape[0]].repeat_interleave(SCALE_BLOCK, 1)
    return (wide * spread[:, : values.shape[1]]).to(dtype)


def run_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routed: Routed,
    activation: Activation,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, inputs]; zeros for padding.

    x: [T, inputs]; gate_up: [E, 2 * width, inputs], gate first; down: [E, inputs, width]; scales: as in `moe.scales`.
    """
    width = down.shape[2]

    def weights_of(expert: int) -> tuple[Tensor, Tensor]:
        scales = [None, None] if gate_up_scales is None else gate_up_scales[2 * expert : 2 * expert + 2]
        halves = [dequantize_part(gate_up[expert, half * width :][:width], scales[half], x.dtype) for half in (0, 1)]
        last = dequantize_part(down[expert], None if down_scales is None else down_scales[expert], x.dtype)
        return torch.cat(halves), last

    return apply_experts(x, weights_of, routed, activation)


def apply_experts(
    x: Tensor, weights_of: Callable[[int], tuple[Tensor, Tensor]], routed: Routed, activation: Activation
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, inputs]; zeros for padding.

    x: [T, inputs]; weights_of: returns the weights of an expert in x's dtype, [2 * width, inputs], gate first, and
    [inputs, width]. The output of an expert is weighted in float32 and rounded; a token's are added in the order of its
    list in float32.
    """
    tokens, top_k = routed.ids.shape
    outputs = torch.zeros(tokens, top_k, x.shape[1], dtype=x.dtype, device=x.device)
    for expert in routed.ids.unique().tolist():
        if expert < 0:
            continue
        first, last = weights_of(expert)
        token, place = (routed.ids == expert).nonzero(as_tuple=True)
        rows = functional.pad(x[token], (0, 0, 0, max(0, MIN_ROWS - len(token))))
        hidden = gated_activation(_matmul(rows, first), activation)
        own = _matmul(hidden, last)[: len(token)].float() * routed.weights[token, place][:, None]
        outputs[token, place] = own.to(x.dtype)
    total = torch.zeros(tokens, x.shape[1], device=x.device)
    for place in range(top_k):
        total += outputs[:, place]
    return total.to(x.dtype)


def with_shared_expert(routed: Tensor, shared: SharedOutput | None) -> Tensor:
    """Return routed + sigmoid(gate(x)) * output, [T, inputs], computed in float32; routed itself without the expert.

    routed: weighted sum of the other experts, [T, inputs].
    """
    if shared is None:
        return routed
    logit = (shared.x.float() * shared.gate.float()).sum(-1, keepdim=True)
    return (routed.float() + logit.sigmoid() * shared.output.float()).to(routed.dtype)


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight.t().contiguous().t() if x.device.type == "cpu" else weight)
