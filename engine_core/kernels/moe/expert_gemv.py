"""Experts of a few tokens: one GEMV for each pair of a token and an expert.

The first kernel computes activation(gate) * up of every pair. A program of the second computes some outputs of one
token: it adds those of the token's experts, weighted, in the order of the token's list, in float32. Experts are read
where they lie, without a sort. Weights have 16 bits, or 8 with scales of rows or blocks; activations have 16.

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
from tandem.engine_core.kernels.moe.routing import Routed
from tandem.engine_core.kernels.moe.scales import SCALED, scale_granularity
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan


@triton.jit
def _scaled(tile, scale_ptr, part, rows, offs_k, N, K: tl.constexpr, SCALES: tl.constexpr):
    """Convert a tile of weights to float32, with the scales of its blocks or rows.

    part: index of an expert, or of a half of one; rows: within it, [ROWS]; scale: as in `moe.scales`.
    """
    wide = cast_weights(tile, tl.float32)
    if SCALES == 1:
        wide *= tl.load(scale_ptr + part * N + rows)[:, None]
    elif SCALES == 2:
        WIDE: tl.constexpr = (K + 127) // 128
        offs = (part * tl.cdiv(N, 128) + rows // 128)[:, None] * WIDE + tl.minimum(offs_k // 128, WIDE - 1)[None, :]
        wide *= tl.load(scale_ptr + offs)
    return wide


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
    first = tl.program_id(0) * (ROWS * TILES)
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
            rows = first + t * ROWS + tl.arange(0, ROWS)
            # Rows past the end repeat the last one and are not stored.
            own = tl.minimum(rows, N - 1)
            if STEPS == 1:
                offs = own[:, None] * K + offs_k[None, :]
                mask = (offs_k < K)[None, :]
                gate_tile = tl.load(base_ptr + offs, mask=mask, other=0.0)
                up_tile = tl.load(base_ptr + N.to(tl.int64) * K + offs, mask=mask, other=0.0)
                gate = tl.sum(_scaled(gate_tile, scale_ptr, expert * 2, own, offs_k, N, K, SCALES) * vector[None, :], 1)
                up = tl.sum(_scaled(up_tile, scale_ptr, expert * 2 + 1, own, offs_k, N, K, SCALES) * vector[None, :], 1)
            else:
                gates = tl.zeros([ROWS, BLOCK_K], tl.float32)
                ups = tl.zeros([ROWS, BLOCK_K], tl.float32)
                for step in tl.range(0, STEPS):
                    columns = step * BLOCK_K + offs_k
                    inside = columns < K
                    offs = own[:, None] * K + columns[None, :]
                    gate_tile = tl.load(base_ptr + offs, mask=inside[None, :], other=0.0)
                    up_tile = tl.load(base_ptr + N.to(tl.int64) * K + offs, mask=inside[None, :], other=0.0)
                    inputs = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
                    gates += _scaled(gate_tile, scale_ptr, expert * 2, own, columns, N, K, SCALES) * inputs
                    ups += _scaled(up_tile, scale_ptr, expert * 2 + 1, own, columns, N, K, SCALES) * inputs
                gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
            result = apply_gate(gate.to(dtype), up.to(dtype), ACTIVATION)
            tl.store(out_ptr + pair.to(tl.int64) * N + rows, result, mask=rows < N)


@triton.jit
def _down_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of one token over all its experts.

    x: [T, TOP_K, K]; weight: [E, N, K]; ids, weights: [T, TOP_K]; out: [T, N]. A token without experts gets zeros.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(rows, N - 1)
    offs_k = tl.arange(0, BLOCK_K)
    offs = own.to(tl.int64)[:, None] * K + offs_k[None, :]
    if not PDL:
        wait_for_previous(PDL)
    # With PDL: the experts were chosen before the preceding kernel started.
    routed = tl.load(ids_ptr + token * TOP_K) >= 0
    expert = tl.maximum(tl.load(ids_ptr + token * TOP_K), 0).to(tl.int64)
    tile = tl.load(weight_ptr + expert * N * K + offs, mask=(offs_k < K)[None, :] & routed, other=0.0)
    if PDL:
        wait_for_previous(PDL)
    total = tl.zeros([ROWS], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        parts = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for step in tl.static_range(STEPS):
            now, owner, columns = tile, expert, step * BLOCK_K + offs_k
            if place + 1 < TOP_K or step + 1 < STEPS:
                if step + 1 == STEPS:
                    expert = tl.maximum(tl.load(ids_ptr + pair + 1), 0).to(tl.int64)
                ahead = (step + 1) % STEPS * BLOCK_K
                mask = (ahead + offs_k < K)[None, :] & routed
                tile = tl.load(weight_ptr + expert * N * K + ahead + offs, mask=mask, other=0.0)
            inside = (columns < K) & routed
            inputs = tl.load(x_ptr + pair.to(tl.int64) * K + columns, mask=inside, other=0.0).to(tl.float32)
            parts += _scaled(now, scale_ptr, owner, own, columns, N, K, SCALES) * inputs[None, :]
        total += tl.sum(parts, 1) * tl.load(weights_ptr + pair)
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
    """Return activation(gate) * up of each pair, [T, k, width]; of padding, undefined values.

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
    x: Tensor, weight: Tensor, scales: Tensor | None, routed: Routed, plan: GemvPlan, pdl: bool = False
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, outputs].

    x: [T, k, inputs], contiguous; weight: [E, outputs, inputs], as in `gate_up_gemv`. With `pdl` the preceding kernel
    may write x, but not the experts and their weights.
    """
    tokens, top_k, inputs = x.shape
    outputs = weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[2] == inputs
    out = torch.empty(tokens, outputs, device=x.device, dtype=x.dtype)
    _down_gemv_kernel[(triton.cdiv(outputs, plan.rows), tokens)](
        *(x, weight, x if scales is None else scales, routed.ids, routed.weights, out, outputs),
        K=inputs,
        TOP_K=top_k,
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        SCALES=SCALED[scale_granularity(scales)],
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
