"""Output of decode attention, optionally quantized for the output projection."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import nan_max
from tandem.engine_core.kernels.paged_pool import in_head
from tandem.engine_core.kernels.quantize import quantized_values, scale_from_amax
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation


@triton.jit
def store_heads(
    out_ptr,
    scales_ptr,
    token,
    head,
    acc,
    g,
    d,
    scale_stride,
    queries,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    QUANT: tl.constexpr,
    dtype: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Store the query heads of a KV head, of `queries` adjacent tokens from `token` on, at most QUERIES.

    acc: [heads, WIDE] float32, token after token, rows past queries * GROUP and elements past D unused; g, d: their
    indices; out: [T, KV_HEADS * GROUP * D] in `dtype`, with each head's absolute maximum, [T, KV_HEADS * GROUP], if
    QUANT is 3; or 8-bit: with the static scale at scales_ptr if QUANT is 1, with one scale per head, [KV_HEADS * GROUP,
    scale_stride], if 2.
    """
    inside = g < GROUP * queries
    mask = in_head(inside, d, D, WIDE)
    if QUERIES > 1:
        token, g = token + g // GROUP, g % GROUP
    first = (token.to(tl.int64) * KV_HEADS + head) * GROUP
    stored: tl.constexpr = out_ptr.dtype.element_ty
    x = acc.to(dtype)
    if QUANT > 1:
        largest = tl.reduce(tl.abs(tl.where(mask, x.to(tl.float32), 0.0)), 1, nan_max)
    if QUANT == 1:
        x = quantized_values(x.to(tl.float32) / tl.load(scales_ptr), stored)
    elif QUANT == 2:
        scale = scale_from_amax(largest, stored)
        tl.store(scales_ptr + (head * GROUP + g).to(tl.int64) * scale_stride + token, scale, mask=inside)
        x = quantized_values(x.to(tl.float32) / scale[:, None], stored)
    elif QUANT == 3:
        tl.store(scales_ptr + first + g, largest, mask=inside)
    out_row = out_ptr + first * D
    if QUERIES > 1:
        out_row = out_row[:, None]
    tl.store(out_row + g[:, None] * D + d[None, :], x, mask=mask)


def check_quantized(batch: int, heads: int, quantized: QuantizedActivation | None, amax: Tensor | None) -> None:
    """Assert that quantized outputs have a static scale or one per head, and that amax fits.

    batch: rows; heads: query heads per row.
    """
    if quantized is not None:
        scales, padded = quantized.scales, quantized.values.shape[0]
        assert scales.ndim == 1 or (scales.shape, scales.stride(0)) == ((padded, heads), 1), "a group is a head"
        assert padded >= batch and quantized.values.is_contiguous()
    if amax is not None:
        assert quantized is None and amax.shape == (batch, heads) and amax.is_contiguous()
