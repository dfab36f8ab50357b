"""Quantization of activations to 8 bits in Triton.

Available as a separate kernel and as an epilogue of others. Oracle: `reference.quantized_activation`. Values are first
rounded to the dtype that a separate kernel would read, so fusion changes no result except for the last bit of a
division.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import nan_max
from tandem.engine_core.kernels.quantized_activation import (
    KNOWN,
    WHOLE,
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)

MAX_INPUTS = 65536
"""Maximum number of inputs for which one program computes the scale of a row."""
GROUP_BLOCK = 1024
"""Inputs per program if it needs no other part of the row."""


@triton.jit
def scale_from_amax(largest, dtype: tl.constexpr):
    """Return the scale that maps an absolute maximum to the largest value of an 8-bit dtype.

    largest: absolute maximum.
    """
    TOP: tl.constexpr = 127.0 if dtype.is_int() else 448.0
    # Avoid a division by zero for all-zero rows.
    return nan_max(largest / TOP, 1.1754943508222875e-38)


@triton.jit
def quantized_values(quotient, dtype: tl.constexpr):
    """Round float32 values to an 8-bit dtype, clamping to its range."""
    TOP: tl.constexpr = 127.0 if dtype.is_int() else 448.0
    quotient = tl.minimum(nan_max(quotient, -TOP), TOP, propagate_nan=tl.PropagateNan.ALL)
    if dtype.is_int():
        # Adding 1.5 * 2^23 rounds to an integer, ties to even as in torch.
        quotient = (quotient + 12582912.0) - 12582912.0
    return quotient.to(dtype)


@triton.jit
def store_quantized(
    values_ptr,
    scales_ptr,
    row,
    first,
    x,
    width,
    scale_stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize part of a row and store it with its scales.

    x: [BLOCK] float32, 0 past the row's end; first: index of the first column, a multiple of GROUP; scales: of groups
    [groups, scale_stride].
    """
    offs = first + tl.arange(0, BLOCK)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    if GROUP == -1:
        quotient = x / tl.load(scales_ptr)
    elif GROUP == 0:
        scale = scale_from_amax(tl.reduce(tl.abs(x), 0, nan_max), dtype)
        tl.store(scales_ptr + row, scale)
        quotient = x / scale
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        grouped = tl.reshape(x, [GROUPS, GROUP])
        scale = scale_from_amax(tl.reduce(tl.abs(grouped), 1, nan_max), dtype)
        group = first // GROUP + tl.arange(0, GROUPS)
        tl.store(scales_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=group < width // GROUP)
        quotient = tl.reshape(grouped / scale[:, None], [BLOCK])
    tl.store(values_ptr + row * width + offs, quantized_values(quotient, dtype), mask=offs < width)


@triton.jit
def store_quantized_tile(values_ptr, scales_ptr, offs_m, first, x, M, width, scale_stride, GROUP: tl.constexpr):
    """Quantize and store part of several rows, like `store_quantized`.

    The scale is static, or each row's part is a group. x: [rows, columns] float32, of rows `offs_m` below M; first:
    index of the first column.
    """
    columns = first + tl.arange(0, x.shape[1])
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    if GROUP == -1:
        quotient = x / tl.load(scales_ptr)
    else:
        scale = scale_from_amax(tl.reduce(tl.abs(x), 1, nan_max), dtype)
        tl.store(scales_ptr + (first // GROUP).to(tl.int64) * scale_stride + offs_m, scale, mask=offs_m < M)
        quotient = x / scale[:, None]
    offsets = values_ptr + offs_m.to(tl.int64)[:, None] * width + columns[None, :]
    mask = (offs_m < M)[:, None] & (columns < width)[None, :]
    tl.store(offsets, quantized_values(quotient, dtype), mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def _finish_rows_kernel(
    values_ptr,
    scales_ptr,
    x_ptr,
    amax_ptr,
    width,
    tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.arange(0, TILES)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * width + offs, mask=offs < width, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    scale = scale_from_amax(tl.reduce(amax, 0, nan_max), dtype)
    if tl.program_id(1) == 0:
        tl.store(scales_ptr + row, scale)
    tl.store(values_ptr + row * width + offs, quantized_values(x / scale, dtype), mask=offs < width)


@triton.jit
def _quantize_kernel(
    values_ptr,
    scales_ptr,
    x_ptr,
    row_stride,
    width,
    scale_stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    offs = first + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * row_stride + offs, mask=offs < width, other=0.0).to(tl.float32)
    store_quantized(values_ptr, scales_ptr, row, first, x, width, scale_stride, GROUP, BLOCK)


def group_of(to: ActivationFormat) -> int:
    """Return the kernels' GROUP of a format."""
    if to.scale is not None:
        return KNOWN
    return WHOLE if to.group is None else to.group


def row_block(width: int, group: int) -> tuple[int, int]:
    """Return the number of elements and of warps of a program.

    It quantizes part of a row, or all of it. width: of the row; group: as the kernels' GROUP. Raises ValueError if a
    row is too wide for one program.
    """
    whole: int = triton.next_power_of_2(width)
    if group != WHOLE:
        block = min(whole, GROUP_BLOCK)
        return block, max(1, block // 256)
    if whole > MAX_INPUTS:
        raise ValueError(f"a row of {width} inputs is too wide for one scale, at most are {MAX_INPUTS}")
    return whole, min(16, max(1, whole // 512))


def quantize(x: Tensor, to: ActivationFormat, pdl: bool = False) -> QuantizedActivation:
    """Quantize rows to 8 bits.

    x: [T, inputs], rows contiguous, float32, bfloat16 or float16. Raises ValueError for other rows, for a group size
    that does not divide the inputs, and for more than 65536 inputs with one scale. Oracle:
    `reference.quantized_activation.quantize`.
    """
    count, inputs = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"quantize needs contiguous rows, found {tuple(x.shape)} with strides {x.stride()}")
    rows = empty_quantized_activation(count, inputs, x.dtype, to, x.device)
    if count == 0:
        return rows
    group = group_of(to)
    block, warps = row_block(inputs, group)
    _quantize_kernel[(count, triton.cdiv(inputs, block))](
        rows.values,
        rows.scales,
        x,
        x.stride(0),
        inputs,
        rows.values.shape[0],
        BLOCK=block,
        GROUP=group,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return rows


def quantize_by_amax(x: Tensor, amax: Tensor, to: ActivationFormat, pdl: bool = False) -> QuantizedActivation:
    """Quantize rows with one scale each, given the absolute maxima of their tiles.

    Several programs share a row, unlike in `quantize`. x: [T, inputs], contiguous; amax: [T, tiles] float32, absolute
    maxima of tiles of columns. Oracle: `reference.quantized_activation.quantize`.
    """
    (count, inputs), tiles = x.shape, amax.shape[1]
    assert group_of(to) == WHOLE and x.is_contiguous() and amax.is_contiguous() and len(amax) == count
    rows = empty_quantized_activation(count, inputs, x.dtype, to, x.device)
    block, warps = row_block(inputs, KNOWN)
    _finish_rows_kernel[(count, triton.cdiv(inputs, block))](
        *(rows.values, rows.scales, x, amax, inputs, tiles),
        BLOCK=block,
        TILES=triton.next_power_of_2(tiles),
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return rows
