"""Experts of many tokens: one GEMM over blocks of pairs of the same expert.

A block is up to BLOCK_M pairs of one expert. Each program finds its block from the experts' counts, so the host does
not need to know the routing: the grid is sized for the worst routing, and programs without a block return at once. As
in `splitk_gemm`, the weights are the left operand: with few pairs per expert, the 64 rows of a tensor core instruction
are rows of the weight instead of padding.

Weights have 16 bits, or 8 with scales per output or per block (`moe.scales`). Activations have 16 bits, or the 8-bit
type of the weights with one scale per row or per row and 128 inputs. Results are written at the indices of their pairs,
and `combine` sums them per token. Oracle: `reference.moe.run_experts`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.eight_bit_weights import cast_weights
from tandem.engine_core.kernels.linear.gemv import apply_gate
from tandem.engine_core.kernels.moe.plans import max_blocks
from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.moe.scales import SCALE_BLOCK, SCALED, scale_granularity
from tandem.engine_core.kernels.moe.shared_expert import gate_weight, shared_arguments
from tandem.engine_core.kernels.quantize import store_quantized_tile
from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)
from tandem.engine_core.kernels.tiles.plan_types import GroupedPlan

COMBINED, COMBINE_WARPS = 1024, 4
"""Columns of a program of `combine`, and its warps."""


@triton.jit
def find_block(counts_ptr, E, block, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the expert of a block, the index of its first pair in the expert's list, and the length of the list.

    Past the last block the expert is E or more.
    """
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(blocks, 0) <= block
    expert = tl.sum(before.to(tl.int32), 0)
    first = block - tl.sum(tl.where(before, blocks, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    return expert, first * BLOCK_M, count


@triton.jit
def load_pairs(pairs_ptr, expert, begin, count, T, BLOCK_M: tl.constexpr):
    """Load the pairs of a block as `find_block` returns it, and return them with their mask."""
    slots = begin + tl.arange(0, BLOCK_M)
    mask = slots < count
    return tl.load(pairs_ptr + expert.to(tl.int64) * T + slots, mask=mask, other=0), mask


@triton.jit
def _scaled_dot(weights, vectors, scales, PAIRS_LEFT: tl.constexpr):
    """Multiply [BLOCK_N, BLOCK_K] by [BLOCK_K, BLOCK_M] and the scales of pairs. PAIRS_LEFT: transpose the result."""
    if PAIRS_LEFT:
        return tl.dot(tl.trans(vectors), tl.trans(weights)) * scales[:, None]
    else:
        return tl.dot(weights, vectors) * scales[None, :]


@triton.jit
def _scaled_outputs(
    sums, scale_ptr, x_scale_ptr, part, offs_n, x_rows, mask_m, N, SCALES: tl.constexpr, X_SCALES: tl.constexpr
):
    """Apply the scales of outputs and of rows to sums, [BLOCK_N, BLOCK_M]. Scales of blocks have been applied."""
    if SCALES == 1:
        sums *= tl.load(scale_ptr + part * N + offs_n, mask=offs_n < N, other=0.0)[:, None]
    if X_SCALES == 1:
        sums *= tl.load(x_scale_ptr + x_rows, mask=mask_m, other=0.0)[None, :]
    return sums


@triton.jit(do_not_specialize=["T", "x_scale_stride", "out_stride"])
def _grouped_gemm_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    counts_ptr,
    pairs_ptr,
    pair_weights_ptr,
    out_ptr,
    out_scale_ptr,
    T,
    E,
    N,
    x_scale_stride,
    out_stride,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANT: tl.constexpr,
    PAIRS_LEFT: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of pairs by some rows of their expert's weight.

    With an ACTIVATION: x: [T, K]; weight: [E, 2 N, K], gate first; out: activation(gate) * up of each pair, [T * TOP_K,
    N]. Without: x: [T * TOP_K, K]; weight: [E, N, K]; out is multiplied by the weights of the pairs.

    SCALES: of the weight, as in `moe.scales`; X_SCALES: 0 for 16-bit x, 1 for x_scale [rows], 2 for [K / 128,
    x_scale_stride]. With SCALES 2 BLOCK_K divides 128, and with X_SCALES 2 it is 128; BLOCK_N divides 128. QUANT:
    quantize out, with out_scale [N / 128, out_stride]; BLOCK_N is 128 then. PAIRS_LEFT, with X_SCALES 2: the pairs are
    the left operand, so that a thread needs the scales of few of them. DTYPE: of values before quantization.
    """
    GATED: tl.constexpr = ACTIVATION > 0
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    KBLOCKS: tl.constexpr = (K + 127) // 128
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if x_dtype.primitive_bitwidth == 32 else "tf32"
    if GATED:
        wait_for_previous(PDL)
    # Without a gate, the pairs were sorted before the preceding kernel started.
    expert, begin, count = find_block(counts_ptr, E, tl.program_id(1), BLOCK_M, BLOCK_E)
    if expert >= E:
        if not GATED:
            wait_for_previous(PDL)
        return
    pairs, mask_m = load_pairs(pairs_ptr, expert, begin, count, T, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    part = expert * 2 if GATED else expert
    # Weight rows past the end repeat the last one and are not stored.
    own = tl.minimum(offs_n, N - 1)
    left_ptr = weight_ptr + part.to(tl.int64) * N * K + own[:, None] * K + offs_k[None, :]
    upper_ptr = left_ptr + N.to(tl.int64) * K
    x_rows = pairs // TOP_K if GATED else pairs
    right_ptr = x_ptr + x_rows.to(tl.int64)[None, :] * K + offs_k[:, None]
    scale_row = scale_ptr + (part * tl.cdiv(N, 128) + first // 128) * KBLOCKS
    upper_scale_row = scale_row + tl.cdiv(N, 128) * KBLOCKS
    HIGH: tl.constexpr = BLOCK_M if PAIRS_LEFT else BLOCK_N
    WIDTH: tl.constexpr = BLOCK_N if PAIRS_LEFT else BLOCK_M
    sums = tl.zeros([HIGH, WIDTH], tl.float32)
    ups = tl.zeros([HIGH, WIDTH], tl.float32)
    if not GATED:
        wait_for_previous(PDL)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        # The compiler removes a constant mask.
        within = offs_k + step * BLOCK_K < K if K % BLOCK_K != 0 else offs_k >= 0
        vectors = tl.load(right_ptr + step * BLOCK_K, mask=mask_m[None, :] & within[:, None], other=0.0)
        if K % BLOCK_K != 0:
            weights = tl.load(left_ptr + step * BLOCK_K, mask=within[None, :], other=0.0)
        else:
            weights = tl.load(left_ptr + step * BLOCK_K)
        if X_SCALES == 0:
            weights = cast_weights(weights, x_dtype) if SCALES > 0 else weights
        if SCALES == 2:
            scales = tl.load(scale_row + step * BLOCK_K // 128)
            if X_SCALES == 2:
                x_scales = tl.load(x_scale_ptr + step * x_scale_stride + x_rows, mask=mask_m, other=0.0)
                sums += _scaled_dot(weights, vectors, x_scales * scales, PAIRS_LEFT)
            else:
                sums += tl.dot(weights, vectors, input_precision=precision) * scales
        else:
            sums = tl.dot(weights, vectors, sums, input_precision=precision)
        if GATED:
            if K % BLOCK_K != 0:
                weights = tl.load(upper_ptr + step * BLOCK_K, mask=within[None, :], other=0.0)
            else:
                weights = tl.load(upper_ptr + step * BLOCK_K)
            if X_SCALES == 0:
                weights = cast_weights(weights, x_dtype) if SCALES > 0 else weights
            if SCALES == 2:
                scales = tl.load(upper_scale_row + step * BLOCK_K // 128)
                if X_SCALES == 2:
                    ups += _scaled_dot(weights, vectors, x_scales * scales, PAIRS_LEFT)
                else:
                    ups += tl.dot(weights, vectors, input_precision=precision) * scales
            else:
                ups = tl.dot(weights, vectors, ups, input_precision=precision)
    if PAIRS_LEFT:
        sums, ups = tl.trans(sums), tl.trans(ups)
    sums = _scaled_outputs(sums, scale_ptr, x_scale_ptr, part, offs_n, x_rows, mask_m, N, SCALES, X_SCALES)
    if GATED:
        ups = _scaled_outputs(ups, scale_ptr, x_scale_ptr, part + 1, offs_n, x_rows, mask_m, N, SCALES, X_SCALES)
        result = apply_gate(sums.to(DTYPE), ups.to(DTYPE), ACTIVATION)
    else:
        result = (sums * tl.load(pair_weights_ptr + pairs, mask=mask_m, other=0.0)[None, :]).to(DTYPE)
    if QUANT:
        rows = tl.where(mask_m, pairs, T * TOP_K)
        tile = tl.trans(result.to(tl.float32))
        store_quantized_tile(out_ptr, out_scale_ptr, rows, first, tile, T * TOP_K, N, out_stride, 128)
    else:
        out_offsets = pairs.to(tl.int64)[None, :] * N + offs_n[:, None]
        tl.store(out_ptr + out_offsets, result, mask=mask_m[None, :] & (offs_n < N)[:, None])


@triton.jit
def _combine_kernel(
    out_ptr,
    x_ptr,
    ids_ptr,
    shared_x_ptr,
    gate_ptr,
    shared_ptr,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the pairs of one token, and its shared expert with a block of SHARED inputs if that is not 0."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    total = tl.zeros([BLOCK], tl.float32)
    if SHARED > 0:
        # The shared expert ran before the preceding kernel.
        share = gate_weight(shared_x_ptr + token * width, gate_ptr, width, SHARED)
        shared = tl.load(shared_ptr + token * width + offs, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    routed = tl.load(ids_ptr + token * TOP_K) >= 0
    for rank in tl.static_range(TOP_K):
        source = x_ptr + (token * TOP_K + rank) * width + offs
        total += tl.load(source, mask=mask & routed, other=0.0).to(tl.float32)
    if SHARED > 0:
        total += share * shared
    tl.store(out_ptr + token * width + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def grouped_gate_up(
    x: Tensor | QuantizedActivation,
    weight: Tensor,
    scales: Tensor | None,
    routed: Routed,
    activation: Activation,
    plan: GroupedPlan,
    to: ActivationFormat | None = None,
    pdl: bool = False,
) -> Tensor | QuantizedActivation:
    """Return activation(gate) * up of each pair, [T * k, width], undefined for padding.

    x: [T, inputs], contiguous, or quantized; weight: [E, 2 * width, inputs], gate first, in x's dtype, float8_e4m3fn or
    its bits as uint8; scales: as in `moe.scales`; routed: sorted; to: format of the result, with groups of 128; None:
    x's dtype before quantization. With `pdl` the preceding kernel may write everything but the weights.
    """
    tokens, top_k = routed.ids.shape
    width = weight.shape[1] // 2
    dtype = x.dtype
    if to is None:
        out = torch.empty(tokens * top_k, width, device=weight.device, dtype=dtype)
        _launch(x, weight, scales, routed, plan, activation, out, None, pdl, dtype)
        return out
    assert to.group == SCALE_BLOCK == plan.block_n, f"tiles of {plan.block_n} outputs hold no groups of {to.group}"
    rows = empty_quantized_activation(tokens * top_k, width, dtype, to, weight.device)
    _launch(x, weight, scales, routed, plan, activation, rows.values, rows.scales, pdl, dtype)
    return rows


def grouped_down(
    x: Tensor | QuantizedActivation,
    weight: Tensor,
    scales: Tensor | None,
    routed: Routed,
    plan: GroupedPlan,
    pdl: bool = False,
) -> Tensor:
    """Return the outputs of each pair times its weight, [T * k, outputs], undefined for padding.

    x: [T * k, inputs]; weight: [E, outputs, inputs]; both as in `grouped_gate_up`. With `pdl` the preceding kernel may
    write x, but not the routing.
    """
    pairs, outputs = routed.ids.numel(), weight.shape[1]
    out = torch.empty(pairs, outputs, device=weight.device, dtype=x.dtype)
    _launch(x, weight, scales, routed, plan, None, out, None, pdl, x.dtype)
    return out


def combine(x: Tensor, routed: Routed, pdl: bool = False, shared: SharedOutput | None = None) -> Tensor:
    """Return the sum of each token's pairs in the order of its experts, [T, width]; zeros for padding.

    x: [T * k, width], contiguous; summed in float32; shared: added to it, also for padding. With `pdl` the preceding
    kernel may write x, but not what the shared expert returned.
    """
    (tokens, top_k), width = routed.ids.shape, x.shape[1]
    out = torch.empty(tokens, width, device=x.device, dtype=x.dtype)
    given, block = shared_arguments(shared, x, width)
    _combine_kernel[(tokens, triton.cdiv(width, COMBINED))](
        *(out, x, routed.ids, *given, width),
        TOP_K=top_k,
        BLOCK=min(COMBINED, triton.next_power_of_2(width)),
        SHARED=block,
        PDL=pdl,
        num_warps=COMBINE_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _launch(
    x: Tensor | QuantizedActivation,
    weight: Tensor,
    scales: Tensor | None,
    routed: Routed,
    plan: GroupedPlan,
    activation: Activation | None,
    out: Tensor,
    out_scales: Tensor | None,
    pdl: bool,
    dtype: torch.dtype,
) -> None:
    """Check the arguments and launch the kernel."""
    (tokens, top_k), experts = routed.ids.shape, weight.shape[0]
    values, x_scales = (x, None) if isinstance(x, Tensor) else (x.values, x.scales)
    outputs, inputs = weight.shape[1] // (1 if activation is None else 2), weight.shape[2]
    counts, pairs = routed.sorted_pairs()
    assert len(counts) == experts, f"pairs of {len(counts)} experts, weights of {experts}"
    assert values.is_contiguous() and weight.is_contiguous() and values.shape[1] == inputs
    granularity = scale_granularity(scales)
    if granularity == "block":
        assert SCALE_BLOCK % plan.block_k == 0 == SCALE_BLOCK % plan.block_n, "a step's weights are in one block"
    by_group = x_scales is not None and granularity == "block"
    if x_scales is not None:
        assert values.dtype == weight.dtype and inputs % SCALE_BLOCK == 0 == inputs % plan.block_k
        assert not by_group or (plan.block_k == SCALE_BLOCK and x_scales.stride(0) == 1)
    blocks = max_blocks(tokens * top_k, experts, plan.block_m)
    _grouped_gemm_kernel[(triton.cdiv(outputs, plan.block_n), blocks)](
        *(values, out if x_scales is None else x_scales, weight, out if scales is None else scales),
        *(counts, pairs, routed.weights, out, out if out_scales is None else out_scales),
        *(tokens, experts, outputs, values.shape[0], out.shape[0]),
        K=inputs,
        TOP_K=top_k,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        BLOCK_E=triton.next_power_of_2(experts),
        STAGES=plan.stages,
        SCALES=SCALED[granularity],
        X_SCALES=0 if x_scales is None else 2 if by_group else 1,
        ACTIVATION=0 if activation is None else activation.value,
        QUANT=out_scales is not None,
        PAIRS_LEFT=by_group and plan.block_m >= 64,
        DTYPE=_DTYPES[dtype],
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
