"""Weights of one byte as numbers, and the scales of their rows."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import floats_of_int8


@triton.jit
def numbers_of(stored, dtype: tl.constexpr):
    """Return stored weights as numbers.

    Bytes without a sign stand for float8 e4m3, which GPUs before compute capability 8.9 cannot convert. Its bits are
    moved into a float16, whose exponents are biased by 8 more.
    """
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    if stored.dtype == tl.int8:
        return floats_of_int8(stored).to(dtype)
    if stored.dtype.is_fp8() and dtype == tl.bfloat16:
        # From float16 straight to bfloat16 there is only a slow instruction, for one number at a time.
        return stored.to(tl.float32).to(dtype)
    return stored.to(dtype)


@triton.jit
def scaled(sums, scale_ptr, offs_n, mask_n, SCALES: tl.constexpr):
    """Multiply sums by the scales of their weight rows, where those have any."""
    if SCALES == 1:
        sums *= tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
    return sums
