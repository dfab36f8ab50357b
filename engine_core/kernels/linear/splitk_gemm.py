"""Split-K GEMM y = x W^T for up to 128 rows of x.

Splitting K lets small weights occupy the whole GPU.

The weights are the left operand, so the 64 rows of a tensor core instruction are rows of W instead of padding of x.
Programs that share a tile of y store float32 partial sums in a workspace; the last to arrive adds them in a fixed
order, so results are deterministic, finishes the tile, and resets its counter to zero.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.eight_bit_weights import (
    apply_row_scales,
    cast_weights,
    scale_group,
    scale_height,
)
from tandem.engine_core.kernels.linear.gemv import add_bias, apply_gate
from tandem.engine_core.kernels.linear.plans import block_rows, workspace_size
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan


@triton.jit
def finish_tile(
    sums,
    ups,
    bias_ptr,
    scale_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Store a tile, if this program is the last of those that share it.

    It adds the partial sums. sums, ups: [BLOCK_N, BLOCK_M] float32, of this program; other arguments as in
    `splitk_gemm_kernel`.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION > 0
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = tile * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    mask_m = (tokens < M)[None, :]
    done = True
    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        STRIDE: tl.constexpr = SIZE * 2 if GATED else SIZE
        offs_tile = rows[:, None] * BLOCK_M + tokens[None, :]
        tile_ptr = partials_ptr + tile * (SPLIT * STRIDE) + offs_tile
        tl.store(tile_ptr + part * STRIDE, sums)
        if GATED:
            tl.store(tile_ptr + part * STRIDE + SIZE, ups)
        # All threads must store their partial sums before the counter publishes them.
        tl.debug_barrier()
        done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if done:
            tl.store(counters_ptr + tile, 0)
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for s in tl.static_range(SPLIT):
                # Bypass L1, which does not see the writes of other programs.
                sums += tl.load(tile_ptr + s * STRIDE, cache_modifier=".cg")
                if GATED:
                    ups += tl.load(tile_ptr + s * STRIDE + SIZE, cache_modifier=".cg")
    if done:
        offs_n = first + rows[:, None]
        sums = apply_row_scales(sums, scale_ptr, offs_n, offs_n < N, SCALES)
        result = add_bias(sums, bias_ptr, offs_n, offs_n < N, HAS_BIAS, dtype)
        if GATED:
            ups = apply_row_scales(ups, scale_ptr + N, offs_n, offs_n < N, SCALES)
            result = apply_gate(result, add_bias(ups, bias_ptr + N, offs_n, offs_n < N, HAS_BIAS, dtype), ACTIVATION)
        tl.store(y_ptr + tokens[None, :] * N + offs_n, result, mask=(offs_n < N) & mask_m)


@triton.jit(do_not_specialize=["M"])
def splitk_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply rows by a transposed weight, with K split among programs.

    x: [M, K]; weight: [N, K] ([2 N, K] with an ACTIVATION, gate first); y: [M, N]; scale, if SCALES is 1: [N]; if
    it is 2, of blocks of HEIGHT x GROUP, [N / HEIGHT, K / GROUP], rounded up, where BLOCK_K divides GROUP.

    Program (i, s) computes part s of N-tile i. partials: float32, [tiles, SPLIT, 1 or 2, BLOCK_N, BLOCK_M]; counters:
    int32 zeros, [tiles].
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype.primitive_bitwidth == 32 else "tf32"
    BLOCKS: tl.constexpr = K // BLOCK_K
    PER: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    GATED: tl.constexpr = ACTIVATION > 0
    WIDE: tl.constexpr = (K + GROUP - 1) // GROUP
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = tile * BLOCK_N
    begin = part * BLOCKS // SPLIT
    count = (part + 1) * BLOCKS // SPLIT - begin
    rows = tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    # Weight rows past the end repeat the last one and are not stored. Tokens past the end are masked: repeated reads of
    # one token's row by all programs were 10 % slower.
    offs = tl.minimum(rows, N - 1 - first)[:, None] * K + offs_k[None, :]
    left_ptr = weight_ptr + first.to(tl.int64) * K + begin * BLOCK_K + offs
    upper_ptr = left_ptr + N.to(tl.int64) * K
    right_ptr = x_ptr + begin * BLOCK_K + tokens[None, :] * K + offs_k[:, None]
    mask_m = (tokens < M)[None, :]
    scale_rows = tl.minimum(first + rows, N - 1) // HEIGHT
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_previous(PDL)
    for step in tl.range(0, PER, num_stages=STAGES):
        # Equal parts need no mask: the compiler removes a constant one.
        within = True if BLOCKS % SPLIT == 0 else step < count
        vectors = tl.load(right_ptr + step * BLOCK_K, mask=mask_m & within, other=0.0)
        weights = cast_weights(tl.load(left_ptr + step * BLOCK_K, mask=within, other=0.0), dtype)
        if SCALES == 2:
            column = tl.minimum((begin + step) * BLOCK_K // GROUP, WIDE - 1)
            scales = tl.load(scale_ptr + scale_rows * WIDE + column)
            sums += tl.dot(weights, vectors, input_precision=precision) * scales[:, None]
        else:
            sums = tl.dot(weights, vectors, sums, input_precision=precision)
        if GATED:
            weights = cast_weights(tl.load(upper_ptr + step * BLOCK_K, mask=within, other=0.0), dtype)
            if SCALES == 2:
                scales = tl.load(scale_ptr + (N // HEIGHT + scale_rows) * WIDE + column)
                ups += tl.dot(weights, vectors, input_precision=precision) * scales[:, None]
            else:
                ups = tl.dot(weights, vectors, ups, input_precision=precision)
    finish_tile(
        sums,
        ups,
        bias_ptr,
        scale_ptr,
        y_ptr,
        partials_ptr,
        counters_ptr,
        M,
        N,
        BLOCK_M,
        BLOCK_N,
        SPLIT,
        HAS_BIAS,
        ACTIVATION,
        SCALES,
    )


def splitk_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: SplitKPlan,
    partials: Tensor,
    counters: Tensor,
    activation: Activation | None = None,
    pdl: bool = False,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W^T + b, [M, N], or its gated activation.

    x: [M, K]; weight: [N, K]; bias: [N]; all of one dtype, or an 8-bit weight with scales as in `quantized_gemv`; out:
    output tensor, contiguous.

    activation: weight and bias hold the gate's rows before the up projection's, and activation(gate) * up is returned,
    [M, N / 2]. partials: float32; counters: int32, zero before and after the call; each at least as large as in
    `workspace_size`. Calls on one stream may share them. With `pdl` the preceding kernel may write x, and use the
    workspace.
    """
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    rows, inputs = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs
    assert inputs % plan.block_k == 0 and plan.split * plan.block_k <= inputs, (
        f"{inputs} inputs are not divisible into {plan.split} parts of blocks of {plan.block_k}"
    )
    floats, tiles = workspace_size(rows, outputs, plan, activation is not None)
    assert partials.numel() >= floats and counters.numel() >= tiles, "workspace too small"
    if scales is not None and scales.ndim == 2:
        assert scale_group(weight, scales) % plan.block_k == 0, "a step of the loop is in one block"
        assert outputs % scale_height(weight, scales) == 0 or activation is None, "the gate ends with a block"
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype) if out is None else out
    assert y.is_contiguous() and y.shape == (rows, outputs), f"a result of {tuple(y.shape)} for {rows} by {outputs}"
    splitk_gemm_kernel[(triton.cdiv(outputs, plan.block_n), plan.split)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        y,
        partials,
        counters,
        rows,
        outputs,
        K=inputs,
        BLOCK_M=block_rows(rows),
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        SPLIT=plan.split,
        STAGES=plan.stages,
        HAS_BIAS=bias is not None,
        ACTIVATION=0 if activation is None else activation.value,
        SCALES=0 if scales is None else scales.ndim,
        HEIGHT=1 if scales is None else scale_height(weight, scales),
        GROUP=1 if scales is None else scale_group(weight, scales) or 1,
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y
