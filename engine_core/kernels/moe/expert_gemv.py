"""Experts of a few tokens: one GEMV for each pair of a token and an expert.

The first kernel computes activation(gate) * up of every pair. A program of the second computes some outputs of one
token as the weighted sum over its experts, in float32 and in a fixed order. The pairs need not be sorted. Weights have
16 bits, or 8 with scales per row or per block; activations have 16.

Oracle: `reference.moe.run_experts`. `pdl`: see `kernels.dependent_launch`.
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
from tandem.engine_core.kernels.moe.plans import tile_experts
from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.moe.scales import SCALE_BLOCK, SCALED, scale_granularity
from tandem.engine_core.kernels.moe.shared_expert import gate_weight, shared_arguments
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan


@triton.jit
def _block_scales(scale_ptr, part, first, step, N, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the scales of groups of 16 inputs of a step, [BLOCK_K / 16].

    part: index of an expert, or of its gate or up half; first: first row of the tile, which lies within one block.
    """
    WIDE: tl.constexpr = (K + 127) // 128
    column = (step * BLOCK_K + tl.arange(0, BLOCK_K // 16) * 16) // 128
    row_ptr = scale_ptr + (part * tl.cdiv(N, 128) + tl.minimum(first, N - 1) // 128) * WIDE
    return tl.load(row_ptr + column, mask=column < WIDE, other=0.0)


@triton.jit
def _tile_sums(tile, inputs, scale_ptr, part, first, step, N, K: tl.constexpr, SCALES: tl.constexpr):
    """Return the dot products of one step of a tile, [ROWS], with the scales of blocks applied.

    tile: [ROWS, BLOCK_K], as stored; inputs: [BLOCK_K] float32.
    """
    products = cast_weights(tile, tl.float32) * inputs[None, :]
    if SCALES == 2:
        ROWS: tl.constexpr = tile.shape[0]
        BLOCK_K: tl.constexpr = tile.shape[1]
        # A thread holds 16 adjacent values, so it multiplies few sums by a scale.
        spans = tl.sum(tl.reshape(products, [ROWS, BLOCK_K // 16, 16]), 2)
        return tl.sum(spans * _block_scales(scale_ptr, part, first, step, N, K, BLOCK_K)[None, :], 1)
    else:
        return tl.sum(products, 1)


@triton.jit
def _gate_up_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    ids_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS * TILES outputs of one pair.

    x: [T, K]; weight: [E, 2 N, K], gate first; ids: [T, TOP_K]; out: [T, TOP_K, N].
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pair = tl.program_id(1)
    offs_k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * K
    if PDL:
        # The kernel before the preceding one wrote x.
        vector = tl.load(x_row + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if not PDL:
        vector = tl.load(x_row + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert >= 0:
        base_ptr = weight_ptr + expert * N * 2 * K
        for t in tl.static_range(TILES):
            first = (tl.program_id(0) * TILES + t) * ROWS
            rows = first + tl.arange(0, ROWS)
            # Rows past the end repeat the last one and are not stored.
            own = tl.minimum(rows, N - 1)
            gate = tl.zeros([ROWS], tl.float32)
            up = tl.zeros([ROWS], tl.float32)
            for step in tl.range(0, STEPS):
                columns = step * BLOCK_K + offs_k
                inside = columns < K
                offs = own[:, None] * K + columns[None, :]
                gate_tile = tl.load(base_ptr + offs, mask=inside[None, :], other=0.0)
                up_tile = tl.load(base_ptr + N.to(tl.int64) * K + offs, mask=inside[None, :], other=0.0)
                inputs = vector
                if STEPS > 1:
                    inputs = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
                gate += _tile_sums(gate_tile, inputs, scale_ptr, expert * 2, first, step, N, K, SCALES)
                up += _tile_sums(up_tile, inputs, scale_ptr, expert * 2 + 1, first, step, N, K, SCALES)
            if SCALES == 1:
                gate *= tl.load(scale_ptr + expert * 2 * N + own)
                up *= tl.load(scale_ptr + (expert * 2 + 1) * N + own)
            result = apply_gate(gate.to(dtype), up.to(dtype), ACTIVATION)
            tl.store(out_ptr + pair.to(tl.int64) * N + rows, result, mask=rows < N)


@triton.jit
def _down_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    ids_ptr,
    weights_ptr,
    shared_x_ptr,
    gate_ptr,
    shared_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of one token, summed over its experts. The tile holds the rows of BLOCK_TOP of them.

    x: [T, TOP_K, K]; weight: [E, N, K]; ids, weights: [T, TOP_K]; out: [T, N]. A token without experts gets zeros.
    BLOCK_TOP: see `plans.tile_experts`; if it is less than TOP_K, the last expert has a tile of its own. SHARED: block
    of inputs of the gate of a shared expert that is not one of them, 0 without it; shared_x, shared: [T, N]; gate: [N].
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WIDE: tl.constexpr = (K + 127) // 128
    LAST: tl.constexpr = TOP_K > BLOCK_TOP
    token = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    own = tl.minimum(rows, N - 1)
    offs_k = tl.arange(0, BLOCK_K)
    ranks = tl.arange(0, BLOCK_TOP)
    if not PDL:
        wait_for_previous(PDL)
    # With PDL: the experts were chosen before the preceding kernel started, so the weights are loaded before it ends.
    experts = tl.load(ids_ptr + token * TOP_K + ranks, mask=ranks < TOP_K, other=-1).to(tl.int64)
    routed = experts >= 0
    experts = tl.maximum(experts, 0)
    tile_ptr = weight_ptr + experts[:, None, None] * N * K + own[None, :, None] * K + offs_k[None, None, :]
    tile = tl.load(tile_ptr, mask=routed[:, None, None] & (offs_k < K)[None, None, :], other=0.0)
    shares = tl.load(weights_ptr + token * TOP_K + ranks, mask=ranks < TOP_K, other=0.0)
    if LAST:
        last = tl.load(ids_ptr + token * TOP_K + BLOCK_TOP).to(tl.int64)
        last_share = tl.load(weights_ptr + token * TOP_K + BLOCK_TOP)
        last_routed = last >= 0
        last = tl.maximum(last, 0)
        last_ptr = weight_ptr + last * N * K + own[:, None] * K + offs_k[None, :]
        last_tile = tl.load(last_ptr, mask=last_routed & (offs_k < K)[None, :], other=0.0)
        last_sums = tl.zeros([ROWS], tl.float32)
        last_x_ptr = x_ptr + (token * TOP_K + BLOCK_TOP).to(tl.int64) * K + offs_k
    if SHARED > 0:
        share = gate_weight(shared_x_ptr + token.to(tl.int64) * N, gate_ptr, N, SHARED)
        shared = tl.load(shared_ptr + token.to(tl.int64) * N + rows, mask=rows < N, other=0.0).to(tl.float32)
    if PDL:
        wait_for_previous(PDL)
    sums = tl.zeros([BLOCK_TOP, ROWS], tl.float32)
    x_ptrs = x_ptr + (token * TOP_K + ranks).to(tl.int64)[:, None] * K + offs_k[None, :]
    for step in tl.static_range(STEPS):
        now = tile
        if step + 1 < STEPS:
            within = (offs_k + (step + 1) * BLOCK_K < K)[None, None, :]
            tile = tl.load(tile_ptr + (step + 1) * BLOCK_K, mask=routed[:, None, None] & within, other=0.0)
        inside = routed[:, None] & (offs_k + step * BLOCK_K < K)[None, :]
        inputs = tl.load(x_ptrs + step * BLOCK_K, mask=inside, other=0.0).to(tl.float32)
        products = cast_weights(now, tl.float32) * inputs[:, None, :]
        if SCALES == 2:
            column = (step * BLOCK_K + tl.arange(0, BLOCK_K // 16) * 16) // 128
            scale_rows = (experts * tl.cdiv(N, 128) + tl.minimum(first, N - 1) // 128) * WIDE
            scales = tl.load(
                scale_ptr + scale_rows[:, None] + column[None, :], mask=(column < WIDE)[None, :], other=0.0
            )
            spans = tl.sum(tl.reshape(products, [BLOCK_TOP, ROWS, BLOCK_K // 16, 16]), 3)
            sums += tl.sum(spans * scales[:, None, :], 2)
        else:
            sums += tl.sum(products, 2)
        if LAST:
            last_now = last_tile
            if step + 1 < STEPS:
                within = (offs_k + (step + 1) * BLOCK_K < K)[None, :]
                last_tile = tl.load(last_ptr + (step + 1) * BLOCK_K, mask=last_routed & within, other=0.0)
            inside = last_routed & (offs_k + step * BLOCK_K < K)
            inputs = tl.load(last_x_ptr + step * BLOCK_K, mask=inside, other=0.0).to(tl.float32)
            last_sums += _tile_sums(last_now, inputs, scale_ptr, last, first, step, N, K, SCALES)
    if SCALES == 1:
        sums *= tl.load(scale_ptr + experts[:, None] * N + own[None, :])
    total = tl.sum(tl.where(routed[:, None], sums * shares[:, None], 0.0), 0)
    if LAST:
        if SCALES == 1:
            last_sums *= tl.load(scale_ptr + last * N + own)
        total += tl.where(last_routed, last_sums * last_share, 0.0)
    if SHARED > 0:
        total += share * shared
    tl.store(out_ptr + token.to(tl.int64) * N + rows, total.to(out_ptr.dtype.element_ty), mask=rows < N)


def gate_up_gemv(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    routed: Routed,
    activation: Activation,
    plan: GemvPlan,
    pdl: bool = False,
) -> Tensor:
    """Return activation(gate) * up of each pair, [T, k, width], undefined for padding.

    x: [T, inputs], contiguous; weight: [E, 2 * width, inputs], gate first, in x's dtype, float8_e4m3fn or its bits as
    uint8; scales: as in `moe.scales`. With `pdl` the preceding kernel may write the experts, but not x.
    """
    (tokens, inputs), top_k = x.shape, routed.ids.shape[1]
    width = weight.shape[1] // 2
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[2] == inputs
    assert plan.tiles == 1 or plan.block_k >= inputs, (
        f"block_k {plan.block_k} must hold whole rows of {inputs} if tiled"
    )
    out = torch.empty(tokens, top_k, width, device=x.device, dtype=x.dtype)
    _gate_up_gemv_kernel[(triton.cdiv(width, plan.rows * plan.tiles), tokens * top_k)](
        *(x, weight, x if scales is None else scales, routed.ids, out, width),
        K=inputs,
        TOP_K=top_k,
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        TILES=plan.tiles,
        SCALES=SCALED[scale_granularity(scales)],
        ACTIVATION=activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def down_gemv(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    routed: Routed,
    plan: GemvPlan,
    pdl: bool = False,
    shared: SharedOutput | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, outputs].

    x: [T, k, inputs], contiguous; weight: [E, outputs, inputs], as in `gate_up_gemv`; shared: added to the sum. With
    `pdl` the preceding kernel may write x, but not the experts, their weights, nor what the shared expert returned.
    """
    tokens, top_k, inputs = x.shape
    outputs = weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[2] == inputs
    assert SCALE_BLOCK % plan.rows == 0 == plan.block_k % 16, "the rows of a tile are in one block of scales"
    out = torch.empty(tokens, outputs, device=x.device, dtype=x.dtype)
    given, block = shared_arguments(shared, x, outputs)
    _down_gemv_kernel[(triton.cdiv(outputs, plan.rows), tokens)](
        *(x, weight, x if scales is None else scales, routed.ids, routed.weights, *given, out, outputs),
        K=inputs,
        TOP_K=top_k,
        BLOCK_TOP=tile_experts(top_k),
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        SCALES=SCALED[scale_granularity(scales)],
        SHARED=block,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
