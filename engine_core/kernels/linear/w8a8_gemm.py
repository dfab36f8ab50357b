"""W8A8 GEMM y = x W^T for many rows.

x has one scale per row, per row and 128 inputs, or per tensor; W one per output or per block of 16 outputs and 128
inputs. With group and block scales, every 128 inputs are multiplied in the tensor cores and then scaled and accumulated
in float32 (DeepSeek-V3, 2024), which also limits the error of Hopper's short FP8 accumulators. Otherwise scales are
applied once, at the end. If there are few tiles, several programs split the inputs of one and add their sums as in
`splitk_gemm`. Oracle: `reference.quantized_activation.quantized_matmul`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import add_bias
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_COLUMNS, SCALE_ROWS
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan


@triton.jit
def scaled_tile(
    sums,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    offs_m,
    offs_n,
    M,
    N,
    BLOCKS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Apply the remaining scales to the sums of a tile, add the bias and round.

    sums: [BLOCK_M, BLOCK_N]; scale_ptr, bias_ptr: of all outputs, or of the half that offs_n indexes.
    """
    mask_n = offs_n < N
    sums = sums.to(tl.float32)
    if not BLOCKS:
        sums *= tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)[None, :]
        if ROW_SCALES:
            sums *= tl.load(x_scale_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        else:
            sums *= tl.load(x_scale_ptr)
    return add_bias(sums, bias_ptr, offs_n[None, :], mask_n[None, :], HAS_BIAS, dtype)


@triton.jit
def store_tile(
    sums,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    offs_m,
    offs_n,
    M,
    N,
    BLOCKS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Finish the sums of a tile as in `scaled_tile`, and store them."""
    result = scaled_tile(
        sums,
        x_scale_ptr,
        scale_ptr,
        bias_ptr,
        offs_m,
        offs_n,
        M,
        N,
        BLOCKS,
        ROW_SCALES,
        HAS_BIAS,
        y_ptr.dtype.element_ty,
    )
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, result, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@triton.jit(do_not_specialize=["M", "x_scale_stride"])
def w8a8_gemm_kernel(
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
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply 8-bit rows by a transposed 8-bit weight.

    x: [M, K]; weight: [N, K]; y: [M, N]. With BLOCKS x_scale: [K / 128, x_scale_stride], scale: [N / 16, K / 128], and
    BLOCK_K is 128; WHOLE: all outputs of a tile share their scales. Otherwise scale: [N], and x_scale: [M] with
    ROW_SCALES, [1] without.

    Program (i, s) computes part s of tile i. Tiles of GROUP_M blocks of rows are consecutive, for reuse of the weights
    in L2. partials: float32, [tiles, SPLIT, BLOCK_M, BLOCK_N]; counters: int32 zeros.
    """
    STEPS: tl.constexpr = K // BLOCK_K
    PER: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty.is_int()
    sum_dtype: tl.constexpr = tl.int32 if IS_INT else tl.float32
    tile = tl.program_id(0)
    part = tl.program_id(1)
    high, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    bundle = tile // (GROUP_M * wide)
    height = tl.minimum(high - bundle * GROUP_M, GROUP_M)
    within_bundle = tile % (GROUP_M * wide)
    first_m = (bundle * GROUP_M + within_bundle % height) * BLOCK_M
    first_n = (within_bundle // height) * BLOCK_N
    begin = part * STEPS // SPLIT
    count = (part + 1) * STEPS // SPLIT - begin
    rows, columns, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    offs_m, offs_n = first_m + rows, first_n + columns
    mask_m = offs_m < M
    # Weight rows past the end repeat the last one and are not stored.
    own_n = tl.minimum(offs_n, N - 1)
    left_ptr = x_ptr + offs_m.to(tl.int64)[:, None] * K + begin * BLOCK_K + offs_k[None, :]
    right_ptr = weight_ptr + own_n.to(tl.int64)[None, :] * K + begin * BLOCK_K + offs_k[:, None]
    x_scale_column = x_scale_ptr + begin * x_scale_stride + offs_m
    scale_column = scale_ptr + (own_n // 16) * STEPS + begin
    if WHOLE:
        scale_column = scale_ptr + (first_n // 16) * STEPS + begin
    sums = tl.zeros([BLOCK_M, BLOCK_N], sum_dtype)
    wait_for_previous(PDL)
    for step in tl.range(0, PER, num_stages=STAGES):
        # Equal parts need no mask: the compiler removes a constant one.
        within = True if STEPS % SPLIT == 0 else step < count
        left = tl.load(left_ptr + step * BLOCK_K, mask=mask_m[:, None] & within, other=0.0)
        right = tl.load(right_ptr + step * BLOCK_K, mask=within, other=0.0)
        if BLOCKS:
            x_scales = tl.load(x_scale_column + step * x_scale_stride, mask=mask_m & within, other=0.0)
            scales = tl.load(scale_column + step, mask=within, other=0.0)
            if WHOLE:
                sums += tl.dot(left, right) * (x_scales * scales)[:, None]
            else:
                sums += tl.dot(left, right) * x_scales[:, None] * scales[None, :]
        else:
            sums = tl.dot(left, right, sums, out_dtype=sum_dtype)
    if SPLIT == 1:
        store_tile(
            sums,
            x_scale_ptr,
            scale_ptr,
            bias_ptr,
            y_ptr,
            offs_m,
            offs_n,
            M,
            N,
            BLOCKS,
            ROW_SCALES,
            HAS_BIAS,
        )
    else:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        tile_ptr = partials_ptr + tile.to(tl.int64) * (SPLIT * SIZE) + rows[:, None] * BLOCK_N + columns[None, :]
        tl.store(tile_ptr + part * SIZE, sums.to(tl.float32))
        # All threads must store their partial sums before the counter publishes them.
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT):
                # Bypass L1, which does not see the writes of other programs.
                total += tl.load(tile_ptr + other * SIZE, cache_modifier=".cg")
            store_tile(
                total, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, offs_m, offs_n, M, N, BLOCKS, ROW_SCALES, HAS_BIAS
            )


def check_factors(x: QuantizedActivation, weight: Tensor, scales: Tensor, plan: W8A8GemmPlan) -> None:
    """Assert that the shapes, dtypes and scales of rows and weights fit."""
    outputs, inputs = weight.shape
    assert x.values.is_contiguous() and weight.is_contiguous() and x.values.shape[1] == inputs
    assert x.values.dtype == weight.dtype and inputs % plan.block_k == 0 and plan.split * plan.block_k <= inputs
    if scales.ndim == 2:
        assert plan.block_k == SCALE_COLUMNS and scales.shape == (triton.cdiv(outputs, SCALE_ROWS), inputs // 128)
        assert x.scales.shape == (x.values.shape[0], inputs // 128) and x.scales.stride(0) == 1
    else:
        assert scales.shape == (outputs,) and x.scales.shape in ((1,), (x.count, 1))


def check_operands(
    x: QuantizedActivation, weight: Tensor, scales: Tensor, plan: W8A8GemmPlan, partials: Tensor, counters: Tensor
) -> None:
    """Assert the preconditions of `w8a8_gemm`."""
    check_factors(x, weight, scales, plan)
    floats, needed = plan.workspace(x.count, weight.shape[0])
    assert partials.numel() >= floats and counters.numel() >= needed, "workspace too small"


def w8a8_options(
    x: QuantizedActivation, weight: Tensor, scales: Tensor, plan: W8A8GemmPlan, whole_blocks: bool, pdl: bool
) -> dict[str, object]:
    """Return the constants and launch options of a W8A8 GEMM."""
    blocks = scales.ndim == 2
    return {
        "K": weight.shape[1],
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "SPLIT": plan.split,
        "STAGES": plan.stages,
        "BLOCKS": blocks,
        "WHOLE": blocks and ((whole_blocks and 128 % plan.block_n == 0) or plan.block_n == SCALE_ROWS),
        "ROW_SCALES": x.scales.ndim == 2,
        "PDL": pdl,
        "num_warps": plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    }


def w8a8_gemm(
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
    """Return x W^T + b, [T, outputs], in x's dtype before quantization.

    weight: [outputs, inputs], of x's dtype, inputs a multiple of `plan.block_k`; scales: float32, [outputs], or
    [outputs / 16, inputs / 128], rounded up, with x in groups of 128; whole_blocks: the scales of each aligned 128
    outputs are equal; bias: [outputs]. partials: float32; counters: int32, zero before and after the call; each at
    least as large as in `plan.workspace`. Calls on one stream may share them.
    """
    check_operands(x, weight, scales, plan, partials, counters)
    outputs = weight.shape[0]
    y = torch.empty(x.count, outputs, device=weight.device, dtype=x.dtype)
    if x.count == 0:
        return y
    w8a8_gemm_kernel[(plan.tiles(x.count, outputs), plan.split)](
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
        GROUP_M=plan.group_m,
        HAS_BIAS=bias is not None,
        **w8a8_options(x, weight, scales, plan, whole_blocks, pdl),
    )
    return y
