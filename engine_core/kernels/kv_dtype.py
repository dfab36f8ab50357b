"""FP8 KV cache: keys and values in float8 e4m3fn, divided by a per-layer scale.

e4m3fn has 4 exponent and 3 mantissa bits. Quantization changes an element by at most 1/16 of it, or by at most 2^-10
below 2^-6. Dequantization is exact in bfloat16, float16 and float32. Values beyond the largest, 448, are clamped;
torch's own conversion returns NaN.

A layer's scales are [2] float32 on the device: keys, values. Attention kernels read the quotients: the query is
multiplied by the key scale before attention, and the result by the value scale.
"""

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite value of e4m3fn."""


def to_pool(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Convert x to the pool's dtype.

    Values out of range of an 8-bit float are clamped. scale: divides x, [] float32; None: 1.
    """
    if scale is not None:
        x = x.float() / scale
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)


def write_pool(pool: Tensor, index: Tensor, x: Tensor, scale: Tensor | None = None) -> None:
    """Store x at the given slots of a pool.

    pool: [slots, ...]; index: [T] int64, slots; x: [T, ...]; scale: as in `to_pool`.
    """
    stored = to_pool(x, pool.dtype, scale)
    if pool.dtype.itemsize == 1:
        pool, stored = pool.view(torch.uint8), stored.view(torch.uint8)
    pool.index_copy_(0, index, stored)


def read_pool(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Read the given slots of a pool as dtype.

    The pool holds 8-bit floats or dtype itself. pool: [slots, ...]; index: [N] int64, slots. Returns [N, ...].
    """
    if pool.dtype.itemsize == 1:
        return pool.view(torch.uint8).index_select(0, index).view(pool.dtype).to(dtype)
    return pool.index_select(0, index)
