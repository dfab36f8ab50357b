"""Conversion of 8-bit weights, and their row scales."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import int8_to_float32
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_COLUMNS, SCALE_ROWS


def scale_height(weight: Tensor, scales: Tensor) -> int:
    """Return the number of outputs that share scales: 1, or SCALE_ROWS for blocks.

    weight: [outputs, inputs]; scales: [outputs], [outputs, groups], or of blocks.
    """
    return 1 if len(scales) == len(weight) else SCALE_ROWS


def scale_group(weight: Tensor, scales: Tensor) -> int:
    """Return the number of inputs that share a scale, 0 for scales of whole outputs.

    weight, scales: as in `scale_height`.
    """
    if scales.ndim == 1:
        return 0
    return SCALE_COLUMNS if scale_height(weight, scales) > 1 else weight.shape[1] // scales.shape[1]


@triton.jit
def cast_weights(stored, dtype: tl.constexpr):
    """Convert stored 8-bit weights to `dtype`, without scales.

    uint8 holds the bits of float8 e4m3, which GPUs below compute capability 8.9 cannot convert. They are shifted into a
    float16, whose exponent bias is larger by 8.
    """
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    if stored.dtype == tl.int8:
        return int8_to_float32(stored).to(dtype)
    if stored.dtype.is_fp8() and dtype == tl.bfloat16:
        # The only direct conversion from float16 to bfloat16 is a slow scalar instruction.
        return stored.to(tl.float32).to(dtype)
    return stored.to(dtype)


@triton.jit
def apply_row_scales(sums, scale_ptr, offs_n, mask_n, SCALES: tl.constexpr):
    """Multiply sums by the scales of their weight rows, if any."""
    if SCALES == 1:
        sums *= tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
    return sums
