"""Experts of many tokens with int4 weights: one GEMM over blocks of pairs of the same expert.

As `grouped_gemm`, with weights that are unpacked in registers right before the tensor cores, as in
`linear.int4_splitk`: a step of the loop covers inputs of one group, whose scale is applied to the step's sums.

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
from tandem.engine_core.kernels.linear.int4_layout import PER_WORD
from tandem.engine_core.kernels.linear.int4_splitk import load_zeros, unpacked
from tandem.engine_core.kernels.moe.grouped_gemm import find_block, load_pairs
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.plans import max_blocks
from tandem.engine_core.kernels.moe.routing import Routed
from tandem.engine_core.kernels.tiles.plan_types import INT4_STRIDE, GroupedPlan


@triton.jit(do_not_specialize=["T"])
def _int4_grouped_gemm_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    counts_ptr,
    pairs_ptr,
    pair_weights_ptr,
    out_ptr,
    T,
    E,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of pairs by BLOCK_N outputs of their expert's weight, or of its gate and up projections.

    x, out, ACTIVATION: as in `_grouped_gemm_kernel`; word: [parts, N, K / 8]; scale: [parts, K / GROUP, N]; zero:
    likewise, four in an int32; RUN: as in `int4_splitk_kernel`; BLOCK_K divides GROUP and 32 * RUN.
    """
    GATED: tl.constexpr = ACTIVATION > 0
    HEIGHT: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    TURNS: tl.constexpr = BLOCK_K // 32
    PARTS: tl.constexpr = RUN // TURNS
    GROUPS: tl.constexpr = K // GROUP
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype.primitive_bitwidth == 32 else "tf32"
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
    part = expert.to(tl.int64) * (2 if GATED else 1)
    # Weight rows past the end repeat the last ones and are not stored.
    local = tl.arange(0, HEIGHT)
    fourth = tl.arange(0, HEIGHT // 4) * 4
    own = tl.minimum(first + local % BLOCK_N, N - 1)
    fourths = tl.minimum(first + fourth % BLOCK_N, N - 4)
    rows = part * N + own + local // BLOCK_N * N
    scale_rows = part * N * GROUPS + own + local // BLOCK_N * (N * GROUPS)
    zero_rows = part * N * GROUPS + fourths + fourth // BLOCK_N * (N * GROUPS)
    column = tl.arange(0, BLOCK_K // 8)
    if PARTS > 1:
        column = column // TURNS * RUN + column % TURNS
    left_ptr = word_ptr + rows[:, None] * (K // 8) + column[None, :]
    x_rows = pairs // TOP_K if GATED else pairs
    right_ptr = x_ptr + x_rows.to(tl.int64)[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
    sums = tl.zeros([HEIGHT, BLOCK_M], tl.float32)
    if not GATED:
        wait_for_previous(PDL)
    for block in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        at = block // PARTS * (4 * RUN) + block % PARTS * TURNS
        group = block * BLOCK_K // GROUP * N
        vectors = tl.load(right_ptr + block * BLOCK_K, mask=mask_m[None, :], other=0.0)
        words = tl.load(left_ptr + at)
        scales = tl.load(scale_ptr + scale_rows + group)
        zeros = load_zeros(zero_ptr, zero_rows + group)
        weights = unpacked(words, zeros, HEIGHT, BLOCK_K, dtype)
        sums += tl.dot(weights, vectors, input_precision=precision) * scales[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, BLOCK_N, BLOCK_M]), (1, 2, 0)))
        result = apply_gate(gate.to(dtype), up.to(dtype), ACTIVATION)
    else:
        result = (sums * tl.load(pair_weights_ptr + pairs, mask=mask_m, other=0.0)[None, :]).to(dtype)
    offs_n = first + tl.arange(0, BLOCK_N)
    out_offsets = pairs.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out_ptr + out_offsets, result, mask=mask_m[None, :] & (offs_n < N)[:, None])


def step_inputs(weight: Int4Weights, most: int) -> int:
    """Return the inputs of a step of the loop: a divisor of the group size and of a block of the layout.

    most: maximum; a power of two that is not below 32.
    """
    sizes = (size for size in (128, 64, 32) if size <= most)
    return next(size for size in sizes if weight.group % size == 0 == (INT4_STRIDE * weight.run) % size)


def int4_grouped_gemm(
    x: Tensor, weight: Int4Weights, routed: Routed, activation: Activation | None, plan: GroupedPlan, pdl: bool = False
) -> Tensor:
    """Return activation(gate) * up of each pair, or its down projection times its weight, [T * k, outputs].

    Undefined for padding. x: [T, inputs] with an activation, [T * k, inputs] without, contiguous; routed: sorted;
    plan.block_k: maximum, see `step_inputs`. With `pdl` the preceding kernel may write everything but the weights with
    an activation, and x without.
    """
    (tokens, top_k), (outputs, inputs) = routed.ids.shape, weight.part_shape
    counts, pairs = routed.sorted_pairs()
    experts = len(counts)
    assert x.is_contiguous() and x.shape == (tokens if activation is not None else tokens * top_k, inputs)
    assert weight.run and outputs % PER_WORD == 0, "no kernel reads groups of this size"
    out = torch.empty(tokens * top_k, outputs, device=x.device, dtype=x.dtype)
    blocks = max_blocks(tokens * top_k, experts, plan.block_m)
    _int4_grouped_gemm_kernel[(triton.cdiv(outputs, plan.block_n), blocks)](
        *(x, weight.words, weight.scales, weight.zeros.view(torch.int32)),
        *(counts, pairs, routed.weights, out, tokens, experts, outputs),
        K=inputs,
        TOP_K=top_k,
        GROUP=weight.group,
        RUN=weight.run,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=step_inputs(weight, plan.block_k),
        BLOCK_E=triton.next_power_of_2(experts),
        STAGES=plan.stages,
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
