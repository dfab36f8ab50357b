"""Experts of a few tokens with int4 weights: a GEMM over blocks of up to 8 pairs of the same expert.

As `int4_grouped_gemm`, with instructions of the tensor cores for 16 rows, which a warp runs on its own, instead of 64:

- A thread loads the words of the weight rows and inputs that it passes to the tensor cores, so that nothing is
  exchanged between threads: see `loaded_rows` and `input_offsets`.
- Zero points are subtracted from the sums, as zero * sum(x): a second matmul by ones has the sums of x.

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
from tandem.engine_core.kernels.linear.int4_unpack import raised_zero, unpack_raised_int4
from tandem.engine_core.kernels.moe.grouped_gemm import find_block, load_pairs
from tandem.engine_core.kernels.moe.int4_grouped_gemm import step_inputs
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.plans import max_blocks
from tandem.engine_core.kernels.moe.routing import Routed
from tandem.engine_core.kernels.tiles.plan_types import NARROW_BLOCK, GroupedPlan


@triton.jit
def loaded_rows(HEIGHT: tl.constexpr, WARPS: tl.constexpr):
    """Return the row of a tile for each row of words that is loaded, such that both are in the same thread.

    Vector loads give row 8 * (WARPS * h + w) + g to warp w, and the tensor cores read row 8 * (2 * w + h) + g from it.
    """
    rows = tl.arange(0, HEIGHT)
    if HEIGHT % (16 * WARPS) == 0:
        rows = rows // (16 * WARPS) * (16 * WARPS) + rows // 8 % WARPS * 16 + rows // (8 * WARPS) % 2 * 8 + rows % 8
    return rows


@triton.jit
def input_offsets(BLOCK_K: tl.constexpr):
    """Return the input at each index of the inner dimension of a step's matmul.

    A thread passes four consecutive indices to the tensor cores: inputs 8 c + 2 t + e of each 16 become 4 t + 2 c + e.
    """
    k = tl.arange(0, BLOCK_K)
    k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    # Asynchronous copies need at least four bytes.
    return tl.max_contiguous(tl.multiple_of(k, 2), 2)


@triton.jit
def raised_weights(words, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, dtype: tl.constexpr):
    """Return the values that `unpack_raised_int4` does, [HEIGHT, BLOCK_K], with inputs ordered as `input_offsets`.

    words: [HEIGHT, BLOCK_K / 8] int32, in the layout of `int4_layout`, rows in the order of `loaded_rows`.
    """
    levels = unpack_raised_int4(words, dtype)
    # From the words' order to that of the inputs: bit fields t, j, e, c, d of an input index.
    levels = tl.reshape(levels, [HEIGHT, 4, BLOCK_K // 32, 2, 2, 2])
    weights = tl.reshape(tl.permute(levels, (0, 2, 5, 1, 4, 3)), [HEIGHT, BLOCK_K])
    if HEIGHT % (16 * WARPS) == 0:
        weights = tl.reshape(weights, [HEIGHT // 16 // WARPS, 2, WARPS, 8, BLOCK_K])
        weights = tl.reshape(tl.permute(weights, (0, 2, 1, 3, 4)), [HEIGHT, BLOCK_K])
    return weights


@triton.jit(do_not_specialize=["T"])
def _int4_narrow_gemm_kernel(
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
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of pairs by BLOCK_N outputs of their expert's weight, or of its gate and up projections.

    Arguments: as in `_int4_grouped_gemm_kernel`; WARPS: of the program; EACH: whether each of the E experts has a
    block, for up to BLOCK_M tokens.
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
    if EACH:
        expert = tl.program_id(1)
        slots = tl.arange(0, BLOCK_M)
        # Loaded at the same time as the count.
        pairs = tl.load(pairs_ptr + expert.to(tl.int64) * T + slots, mask=slots < T, other=0)
        count = tl.load(counts_ptr + expert)
        mask_m = slots < count
        pairs = tl.where(mask_m, pairs, 0)
        empty = count == 0
    else:
        expert, begin, count = find_block(counts_ptr, E, tl.program_id(1), BLOCK_M, BLOCK_E)
        empty = expert >= E
        pairs, mask_m = load_pairs(pairs_ptr, tl.minimum(expert, E - 1), begin, count, T, BLOCK_M)
    if empty:
        if not GATED:
            wait_for_previous(PDL)
        return
    first = tl.program_id(0) * BLOCK_N
    part = expert.to(tl.int64) * (2 if GATED else 1)
    local, loaded = tl.arange(0, HEIGHT), loaded_rows(HEIGHT, WARPS)
    own, rows = first + local % BLOCK_N, first + loaded % BLOCK_N
    if N % BLOCK_N != 0:
        # Weight rows past the end repeat the last one and are not stored.
        own, rows = tl.minimum(own, N - 1), tl.minimum(rows, N - 1)
    own += local // BLOCK_N * (N * GROUPS)
    rows += loaded // BLOCK_N * N
    column = tl.arange(0, BLOCK_K // 8)
    if PARTS > 1:
        column = column // TURNS * RUN + column % TURNS
    left_ptr = word_ptr + part * N * (K // 8) + (rows[:, None] * (K // 8) + column[None, :])
    scale_row = scale_ptr + part * N * GROUPS + own
    # Each row loads the four bytes that hold its zero point.
    zero_row = zero_ptr + part * N * GROUPS // 4 + own // 4
    shift = own % 4 * 8
    x_rows = pairs // TOP_K if GATED else pairs
    right_ptr = x_ptr + (x_rows[None, :] * K + input_offsets(BLOCK_K)[:, None])
    # Joined as the weights are, so that the compiler chooses the same order of inputs for both.
    half = tl.full([HEIGHT, BLOCK_K // 2], 1.0, dtype)
    ones = tl.reshape(tl.join(half, half), [HEIGHT, BLOCK_K])
    sums = tl.zeros([HEIGHT, BLOCK_M], tl.float32)
    if not GATED:
        wait_for_previous(PDL)
    # Two steps at a time read 128 consecutive bytes of each row.
    for block in tl.range(0, K // BLOCK_K, num_stages=STAGES, loop_unroll_factor=2):
        at = block // PARTS * (4 * RUN) + block % PARTS * TURNS
        group = block * BLOCK_K // GROUP * N
        vectors = tl.load(right_ptr + block * BLOCK_K, mask=mask_m[None, :], other=0.0)
        words = tl.load(left_ptr + at)
        scales = tl.load(scale_row + group)
        zeros = (tl.load(zero_row + group // 4) >> shift) & 255
        weights = raised_weights(words, HEIGHT, BLOCK_K, WARPS, dtype)
        product = tl.dot(weights, vectors, input_precision=precision)
        total = tl.dot(ones, vectors, input_precision=precision)
        sums += (product - total * raised_zero(zeros, dtype)[:, None]) * scales[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, BLOCK_N, BLOCK_M]), (1, 2, 0)))
        result = apply_gate(gate.to(dtype), up.to(dtype), ACTIVATION)
    else:
        result = (sums * tl.load(pair_weights_ptr + pairs, mask=mask_m, other=0.0)[None, :]).to(dtype)
    offs_n = first + tl.arange(0, BLOCK_N)
    out_offsets = pairs[None, :] * N + offs_n[:, None]
    tl.store(out_ptr + out_offsets, result, mask=mask_m[None, :] & (offs_n < N)[:, None])


def int4_narrow_gemm(
    x: Tensor, weight: Int4Weights, routed: Routed, activation: Activation | None, plan: GroupedPlan, pdl: bool = False
) -> Tensor:
    """Return activation(gate) * up of each pair, or its down projection times its weight, [T * k, outputs].

    Arguments: as of `int4_grouped_gemm`, with plan.block_m of NARROW_BLOCK.
    """
    (tokens, top_k), (outputs, inputs) = routed.ids.shape, weight.part_shape
    counts, pairs = routed.sorted_pairs()
    experts, size = len(counts), tokens * top_k
    assert x.is_contiguous() and x.shape == (tokens if activation is not None else size, inputs)
    assert weight.run and outputs % PER_WORD == 0, "no kernel reads groups of this size"
    assert plan.block_m == NARROW_BLOCK and size * max(inputs, outputs) < 2**31
    out = torch.empty(size, outputs, device=x.device, dtype=x.dtype)
    # If few experts have no pair, an empty block for each of them costs less than finding the others.
    each = tokens <= NARROW_BLOCK and experts <= 2 * size
    blocks = experts if each else max_blocks(size, experts, NARROW_BLOCK)
    _int4_narrow_gemm_kernel[(triton.cdiv(outputs, plan.block_n), blocks)](
        *(x, weight.words, weight.scales, weight.zeros.view(torch.int32)),
        *(counts, pairs, routed.weights, out, tokens, experts),
        N=outputs,
        K=inputs,
        TOP_K=top_k,
        GROUP=weight.group,
        RUN=weight.run,
        BLOCK_M=NARROW_BLOCK,
        BLOCK_N=plan.block_n,
        BLOCK_K=step_inputs(weight, plan.block_k),
        BLOCK_E=triton.next_power_of_2(experts),
        STAGES=plan.stages,
        WARPS=plan.warps,
        EACH=each,
        ACTIVATION=0 if activation is None else activation.value,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
