"""Gated W8A8 GEMM, by default with quantized output, for few rows.

Computes activation(x G^T) * (x U^T). A program multiplies all rows by a tile of the gate's outputs and by the same of
the up projection's, applies the gate, and quantizes the result for the next matmul if the scale is static or depends on
one tile only. Oracles: `reference.quantized_activation.quantized_matmul` and `quantized_gate`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import nan_max
from tandem.engine_core.kernels.linear.gemv import apply_gate
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_COLUMNS
from tandem.engine_core.kernels.linear.w8a8_gemm import check_factors, scaled_tile
from tandem.engine_core.kernels.quantize import group_of, quantize_by_amax, store_quantized_tile
from tandem.engine_core.kernels.quantized_activation import (
    WHOLE,
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
    quantizes_in_tiles,
)
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan


@triton.jit(do_not_specialize=["M", "x_scale_stride", "out_stride"])
def gated_w8a8_gemm_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    out_scale_ptr,
    M,
    N,
    x_scale_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply rows by both halves of a transposed weight, apply the gate, and quantize.

    x: [M, K], M at most BLOCK_M; weight: [2 N, K], gate first; out: [M, N]. GROUP: as in `kernels.quantize`. out_scale:
    [1] if static; with groups, of BLOCK_N, [N / GROUP, out_stride]. With row scales, which no single program can
    compute, out gets unquantized values, and out_scale, [M, out_stride], the absolute maximum of each row and tile.
    DTYPE: of values before quantization. Other arguments as in `w8a8_gemm_kernel`; with BLOCKS all outputs of a tile
    share their scales.
    """
    STEPS: tl.constexpr = K // BLOCK_K
    sum_dtype: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.is_int() else tl.float32
    first = tl.program_id(0) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    # Weight rows past the end repeat the last one and are not stored.
    own_n = tl.minimum(offs_n, N - 1).to(tl.int64)
    left_ptr = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    gate_ptr = weight_ptr + own_n[None, :] * K + offs_k[:, None]
    up_ptr = weight_ptr + (own_n + N)[None, :] * K + offs_k[:, None]
    gates = tl.zeros([BLOCK_M, BLOCK_N], sum_dtype)
    ups = tl.zeros([BLOCK_M, BLOCK_N], sum_dtype)
    wait_for_previous(PDL)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        left = tl.load(left_ptr + step * BLOCK_K, mask=mask_m[:, None], other=0.0)
        gate_weights = tl.load(gate_ptr + step * BLOCK_K)
        up_weights = tl.load(up_ptr + step * BLOCK_K)
        if BLOCKS:
            x_scales = tl.load(x_scale_ptr + step * x_scale_stride + offs_m, mask=mask_m, other=0.0)
            gate_scale = tl.load(scale_ptr + first // 16 * STEPS + step)
            up_scale = tl.load(scale_ptr + (N + first) // 16 * STEPS + step)
            gates += tl.dot(left, gate_weights) * (x_scales * gate_scale)[:, None]
            ups += tl.dot(left, up_weights) * (x_scales * up_scale)[:, None]
        else:
            gates = tl.dot(left, gate_weights, gates, out_dtype=sum_dtype)
            ups = tl.dot(left, up_weights, ups, out_dtype=sum_dtype)
    gate = scaled_tile(
        gates, x_scale_ptr, scale_ptr, bias_ptr, offs_m, offs_n, M, N, BLOCKS, ROW_SCALES, HAS_BIAS, DTYPE
    )
    up = scaled_tile(
        ups, x_scale_ptr, scale_ptr + N, bias_ptr + N, offs_m, offs_n, M, N, BLOCKS, ROW_SCALES, HAS_BIAS, DTYPE
    )
    result = apply_gate(gate, up, ACTIVATION)
    if GROUP == 0:
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], result, mask=mask)
        largest = tl.reduce(tl.abs(result.to(tl.float32)), 1, nan_max)
        tl.store(out_scale_ptr + offs_m * out_stride + tl.program_id(0), largest, mask=mask_m)
    else:
        store_quantized_tile(out_ptr, out_scale_ptr, offs_m, first, result.to(tl.float32), M, N, out_stride, GROUP)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def gated_w8a8_gemm(
    x: QuantizedActivation,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    plan: W8A8GemmPlan,
    activation: Activation,
    to: ActivationFormat,
    pdl: bool = False,
) -> QuantizedActivation:
    """Return activation(gate) * up of a matmul, quantized to 8 bits, [T, outputs / 2].

    x: at most `plan.block_m` rows; weight: [outputs, inputs], gate first, of x's dtype, inputs a multiple of
    `plan.block_k`; scales: float32, [outputs], or [outputs / 16, inputs / 128] with x in groups of 128, where the
    scales of each aligned 128 outputs of a half are equal; bias: [outputs]; to: format of the result, with groups, if
    any, of `plan.block_n`. With row scales, a second launch quantizes.
    """
    group = group_of(to)
    if group == WHOLE:
        out, amax = _launch_unquantized(x, weight, scales, bias, plan, activation, pdl)
        return quantize_by_amax(out, amax, to, pdl)
    rows = empty_quantized_activation(x.count, weight.shape[0] // 2, x.dtype, to, weight.device)
    out_stride = rows.values.shape[0]
    _launch(x, weight, scales, bias, plan, activation, rows.values, rows.scales, out_stride, group, pdl)
    return rows


def gated_w8a8_gemm_unquantized(
    x: QuantizedActivation,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    plan: W8A8GemmPlan,
    activation: Activation,
    pdl: bool = False,
) -> Tensor:
    """Return activation(gate) * up of a matmul, [T, outputs / 2], in x's dtype before quantization.

    Arguments as in `gated_w8a8_gemm`.
    """
    return _launch_unquantized(x, weight, scales, bias, plan, activation, pdl)[0]


def _launch_unquantized(
    x: QuantizedActivation,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    plan: W8A8GemmPlan,
    activation: Activation,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gated matmul, and the absolute maximum of each row and tile."""
    width = weight.shape[0] // 2
    tiles = triton.cdiv(width, plan.block_n)
    out = torch.empty(x.count, width, dtype=x.dtype, device=weight.device)
    amax = torch.empty(x.count, tiles, device=weight.device)
    _launch(x, weight, scales, bias, plan, activation, out, amax, tiles, WHOLE, pdl)
    return out, amax


def _launch(
    x: QuantizedActivation,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    plan: W8A8GemmPlan,
    activation: Activation,
    out: Tensor,
    out_scales: Tensor,
    out_stride: int,
    group: int,
    pdl: bool,
) -> None:
    outputs, inputs = weight.shape
    width = outputs // 2
    _check(x, weight, scales, plan, group)
    gated_w8a8_gemm_kernel[(triton.cdiv(width, plan.block_n),)](
        *(x.values, x.scales, weight, scales, weight if bias is None else bias, out, out_scales),
        *(x.count, width, x.values.shape[0], out_stride),
        K=inputs,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        STAGES=plan.stages,
        BLOCKS=scales.ndim == 2,
        ROW_SCALES=x.scales.ndim == 2,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation.value,
        GROUP=group,
        DTYPE=_DTYPES[x.dtype],
        PDL=pdl,
        num_warps=plan.warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def _check(x: QuantizedActivation, weight: Tensor, scales: Tensor, plan: W8A8GemmPlan, group: int) -> None:
    width = weight.shape[0] // 2
    assert 0 < x.count <= plan.block_m, f"{x.count} rows do not fit a tile of {plan.block_m}"
    assert plan.split == 1 and weight.shape[0] % 2 == 0, "one program makes both halves of its outputs"
    assert quantizes_in_tiles(group, plan.block_n), f"tiles of {plan.block_n} outputs hold no groups of {group}"
    whole = width % SCALE_COLUMNS == 0 == SCALE_COLUMNS % plan.block_n and plan.block_k == SCALE_COLUMNS
    assert scales.ndim == 1 or whole, "a tile's outputs share their scales"
    check_factors(x, weight, scales, plan)
