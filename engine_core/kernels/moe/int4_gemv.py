"""Experts of a few tokens with int4 weights: a GEMV for each pair of a token and an expert.

Weights are unpacked as in `linear.quantized_gemv`. The kernel computes activation(gate) * up of each pair, or its down
projection times the weight of the pair; `grouped_gemm.combine` adds those of a token in a fixed order.

Oracle: `reference.moe.apply_experts`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import apply_gate
from tandem.engine_core.kernels.linear.packed_dot import INT4, prepare_inputs, words_per_sum
from tandem.engine_core.kernels.linear.quantized_gemv import load_tile, tile_sums
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.routing import Routed
from tandem.engine_core.kernels.tiles.plan_types import INT4_STRIDE, GemvPlan

_SPAN = 4
"""Words per vector load of a thread, as in `linear.quantized_gemv`."""


@triton.jit
def _int4_pair_gemv_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    SPAN: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of one pair.

    With an ACTIVATION: x: [T, K]; the weight of an expert has two parts, gate first; out: [T * TOP_K, N]. Without:
    x: [T * TOP_K, K]; one part; out is multiplied by the weights of the pairs. word: [parts, N, K / 8] int32; scale,
    zero: [parts, K / GROUP, N]; ids, weights: [T, TOP_K]; RUN, SPAN, COUNT: as in `packed_dot.prepare_inputs`.
    """
    GATED: tl.constexpr = ACTIVATION > 0
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pair = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    if GATED:
        wait_for_previous(PDL)
    # Without a gate, the experts were chosen before the preceding kernel started, so weights are loaded before it ends.
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    routed = expert >= 0
    part = tl.maximum(expert, 0) * (2 if GATED else 1)
    words_ptr = word_ptr + part * N * (K // 8)
    scales_ptr = scale_ptr + part * N * (K // GROUP)
    zeros_ptr = zero_ptr + part * N * (K // GROUP)
    words, scales, zeros = load_tile(
        words_ptr, scales_ptr, zeros_ptr, first, 0, N, N, routed, K, ROWS, BLOCK_K, 0, GROUP, RUN, SPAN
    )
    if not GATED:
        wait_for_previous(PDL)
    x_row = x_ptr + (pair // TOP_K if GATED else pair).to(tl.int64) * K
    sums = tl.zeros([ROWS, BLOCK_K // 8 // SPAN], tl.float32)
    ups = tl.zeros([ROWS, BLOCK_K // 8 // SPAN], tl.float32)
    for step in tl.range(0, STEPS, num_stages=1):
        columns = step * BLOCK_K + offs_k
        vector = tl.load(x_row + columns, mask=routed & (columns < K), other=0.0).to(tl.float32)
        x, back = prepare_inputs(vector, 0, RUN, SPAN, COUNT)
        if GATED:
            up_words, up_scales, up_zeros = load_tile(
                words_ptr + N.to(tl.int64) * (K // 8),
                scales_ptr + N.to(tl.int64) * (K // GROUP),
                zeros_ptr + N.to(tl.int64) * (K // GROUP),
                first,
                step,
                N,
                N,
                routed,
                K,
                ROWS,
                BLOCK_K,
                0,
                GROUP,
                RUN,
                SPAN,
            )
            ups += tile_sums(up_words, up_scales, up_zeros, x, back, 0, GROUP, SPAN, COUNT)
        sums += tile_sums(words, scales, zeros, x, back, 0, GROUP, SPAN, COUNT)
        words, scales, zeros = load_tile(
            words_ptr,
            scales_ptr,
            zeros_ptr,
            first,
            step + 1,
            N,
            N,
            routed & (step + 1 < STEPS),
            K,
            ROWS,
            BLOCK_K,
            0,
            GROUP,
            RUN,
            SPAN,
        )
    if GATED:
        result = apply_gate(tl.sum(sums, 1).to(dtype), tl.sum(ups, 1).to(dtype), ACTIVATION)
    else:
        result = (tl.sum(sums, 1) * tl.load(weights_ptr + pair)).to(dtype)
    tl.store(out_ptr + pair.to(tl.int64) * N + rows, result, mask=(rows < N) & routed)


def int4_pair_gemv(
    x: Tensor, weight: Int4Weights, routed: Routed, activation: Activation | None, plan: GemvPlan, pdl: bool = False
) -> Tensor:
    """Return activation(gate) * up of each pair, or its down projection times its weight, [T * k, outputs].

    Undefined for padding. x: [T, inputs] with an activation, [T * k, inputs] without, contiguous. With `pdl` the
    preceding kernel may write the experts with an activation, and x without.
    """
    (tokens, top_k), (outputs, inputs) = routed.ids.shape, weight.part_shape
    group, run = weight.group, weight.run
    span = _SPAN if group % (INT4_STRIDE * run) == 0 else 1
    rows = tokens if activation is not None else tokens * top_k
    assert x.is_contiguous() and x.shape == (rows, inputs)
    assert run and plan.block_k % (INT4_STRIDE * run) == 0, f"steps of {plan.block_k} end within a block of the order"
    out = torch.empty(tokens * top_k, outputs, device=x.device, dtype=x.dtype)
    _int4_pair_gemv_kernel[(triton.cdiv(outputs, plan.rows), tokens * top_k)](
        *(x, weight.words, weight.scales, weight.zeros, routed.ids, routed.weights, out, outputs),
        K=inputs,
        TOP_K=top_k,
        GROUP=group,
        RUN=run,
        SPAN=span,
        COUNT=words_per_sum(INT4, span),
        ROWS=plan.rows,
        BLOCK_K=plan.block_k,
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
