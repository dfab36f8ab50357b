"""Keys and values in 8-bit floats (e4m3fn), stored without a scale.

e4m3fn has 4 bits of exponent and 3 of mantissa. Rounding changes an element by at most 1/16 of it, and one smaller than
2^-6 by at most 2^-10. Reading is exact: every such number exists in bfloat16, float16 and float32 too. The largest is
448, and larger ones are clamped to it, where torch's own conversion gives NaN.
"""

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite number of e4m3fn."""


def to_pool(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to the dtype of a pool.

    Values that an 8-bit float cannot represent are clamped to its largest.
    """
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)


def write_pool(pool: Tensor, index: Tensor, x: Tensor) -> None:
    """Store x at the given slots of a pool.

    pool: [slots, ...]; index: [T] int64, slots; x: [T, ...].
    """
    stored = to_pool(x, pool.dtype)
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
