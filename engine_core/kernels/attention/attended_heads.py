"""Storing of what decode attention returns.

They are numbers, or bytes for the output projection.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import larger
from tandem.engine_core.kernels.paged_pool import in_head
from tandem.engine_core.kernels.quantize import rounded_bytes, scale_of


@triton.jit
def store_heads(
    out_ptr, scales_ptr, token, head, acc, g, d, scale_stride, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Store the query heads of a token's KV head.

    acc: [heads, WIDE] float32, those past GROUP and elements past D unused; g, d: its places; out: [T, KV_HEADS * GROUP
    * D] in `dtype`, or with BYTES in one byte: 1 with the scale at scales_ptr, 2 with one for each head, [KV_HEADS *
    GROUP, scale_stride].
    """
    mask = in_head(g < GROUP, d, D, WIDE)
    places = out_ptr + (token.to(tl.int64) * KV_HEADS + head) * GROUP * D + g[:, None] * D + d[None, :]
    if BYTES == 0:
        tl.store(places, acc.to(dtype), mask=mask)
    else:
        numbers = tl.where(mask, acc.to(dtype).to(tl.float32), 0.0)
        if BYTES == 1:
            quotient = numbers / tl.load(scales_ptr)
        else:
            scale = scale_of(tl.reduce(tl.abs(numbers), 1, larger), out_ptr.dtype.element_ty)
            tl.store(scales_ptr + (head * GROUP + g).to(tl.int64) * scale_stride + token, scale, mask=g < GROUP)
            quotient = numbers / scale[:, None]
        tl.store(places, rounded_bytes(quotient, out_ptr.dtype.element_ty), mask=mask)
