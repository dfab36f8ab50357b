"""Split-K W8A8 GEMM y = x W^T for up to 32 rows.

As in `kernels.linear.splitk_gemm` the weights are the left operand, so few rows are padded to 16 or 32 instead of to
the 64 of Hopper's tensor core instructions, and programs split the inputs of a tile. Block scales are applied to each
128 inputs' sums, others at the end. Oracle: `reference.quantized_activation.quantized_matmul`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.quantized_plans import MAX_SPLITK_ROWS
from tandem.engine_core.kernels.linear.splitk_gemm import finish_tile
from tandem.engine_core.kernels.linear.w8a8_gemm import check_operands, w8a8_gemm, w8a8_options
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan


@triton.jit(do_not_specialize=["M", "x_scale_stride"])
def w8a8_splitk_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    x_scale_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply 8-bit rows by a transposed 8-bit weight.

    Arguments as in `w8a8_gemm_kernel`, with M at most BLOCK_M. Program (i, s) computes part s of N-tile i. partials:
    float32, [tiles, SPLIT, BLOCK_N, BLOCK_M]; counters: int32 zeros, [tiles].
    """
    STEPS: tl.constexpr = K // BLOCK_K
    PER: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    sum_dtype: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.is_int() else tl.float32
    part = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    begin = part * STEPS // SPLIT
    count = (part + 1) * STEPS // SPLIT - begin
    tokens = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = tokens < M
    # Weight rows past the end repeat the last one and are not stored.
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)
    left_ptr = weight_ptr + rows.to(tl.int64)[:, None] * K + begin * BLOCK_K + offs_k[None, :]
    right_ptr = x_ptr + begin * BLOCK_K + tokens[None, :] * K + offs_k[:, None]
    x_scale_column = x_scale_ptr + begin * x_scale_stride + tokens
    scale_column = scale_ptr + (rows // 16) * STEPS + begin
    if WHOLE:
        scale_column = scale_ptr + (first // 16) * STEPS + begin
    sums = tl.zeros([BLOCK_N, BLOCK_M], sum_dtype)
    wait_for_previous(PDL)
    for step in tl.range(0, PER, num_stages=STAGES):
        # Equal parts need no mask: the compiler removes a constant one.
        within = True if STEPS % SPLIT == 0 else step < count
        vectors = tl.load(right_ptr + step * BLOCK_K, mask=mask_m[None, :] & within, other=0.0)
        weights = tl.load(left_ptr + step * BLOCK_K, mask=within, other=0.0)
        if BLOCKS:
            x_scales = tl.load(x_scale_column + step * x_scale_stride, mask=mask_m & within, other=0.0)
            scales = tl.load(scale_column + step, mask=within, other=0.0)
            if WHOLE:
                sums += tl.dot(weights, vectors) * (x_scales * scales)[None, :]
            else:
                sums += tl.dot(weights, vectors) * scales[:, None] * x_scales[None, :]
        else:
            sums = tl.dot(weights, vectors, sums, out_dtype=sum_dtype)
    total = sums.to(tl.float32)
    if not BLOCKS:
        if ROW_SCALES:
            total *= tl.load(x_scale_ptr + tokens, mask=mask_m, other=0.0)[None, :]
        else:
            total *= tl.load(x_scale_ptr)
    finish_tile(
        total,
        total,
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
        0,
        0 if BLOCKS else 1,
    )


def w8a8_splitk(
    x: QuantizedActivation,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    plan: W8A8GemmPlan,
    partials: Tensor,
    counters: Tensor,
    whole_blocks: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return x W^T + b, [T, outputs], for at most `plan.block_m` rows.

    Arguments as in `w8a8_gemm`; without block scales, plan.block_k may exceed 128.
    """
    check_operands(x, weight, scales, plan, partials, counters)
    outputs = weight.shape[0]
    assert 0 < x.count <= plan.block_m, f"{x.count} rows do not fit a tile of {plan.block_m}"
    y = torch.empty(x.count, outputs, device=weight.device, dtype=x.dtype)
    w8a8_splitk_kernel[(triton.cdiv(outputs, plan.block_n), plan.split)](
        x.values,
        x.scales,
        weight,
        scales,
        y if bias is None else bias,
        y,
        partials,
        counters,
        x.count,
        outputs,
        x.values.shape[0],
        HAS_BIAS=bias is not None,
        **w8a8_options(x, weight, scales, plan, whole_blocks, pdl),
    )
    return y


def w8a8_matmul(
    x: QuantizedActivation,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    plan: W8A8GemmPlan,
    partials: Tensor,
    counters: Tensor,
    whole_blocks: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return the GEMM of `w8a8_gemm`, using the kernel of the plan.

    Tiles of at most 32 rows that hold all rows use `w8a8_splitk`.
    """
    few = 0 < x.count <= plan.block_m <= MAX_SPLITK_ROWS
    gemm = w8a8_splitk if few else w8a8_gemm
    return gemm(x, weight, scales, bias, plan, partials, counters, whole_blocks, pdl)
