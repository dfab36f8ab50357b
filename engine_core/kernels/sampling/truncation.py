"""Truncation parameters of a row, and the mask of the kept tokens.

Tokens are ranked by logit, ties by lower id, and truncation keeps those down to a rank.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TOP_K, TOP_P
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS
from tandem.engine_core.kernels.sampling.sort_key import rank_id, rank_value

MIN_P = tl.constexpr(FLOAT_COLUMNS.index("min_p"))


@triton.jit
def load_truncation(ints_ptr, floats_ptr, row, vocab):
    """Return a row's top-k, top-p and the minimum y that min-p keeps.

    Top-k is 0 if it drops nothing.
    """
    top_k = tl.load(ints_ptr + row * NUM_INTS + TOP_K)
    top_p = tl.load(floats_ptr + row * NUM_FLOATS + TOP_P)
    min_p = tl.load(floats_ptr + row * NUM_FLOATS + MIN_P)
    # Triton treats a constant below the smallest normal float32 as float64, and promotes everything to it.
    least = tl.where(min_p > 0.0, tl.log2(tl.minimum(tl.maximum(min_p, 2.0**-126), 1.0)), float("-inf"))
    return tl.where((top_k > 0) & (top_k < vocab), top_k, 0), top_p, least


@triton.jit
def ranks_at_least(x, ids, least):
    """Return true for tokens of rank `least` or better.

    Comparing floats is faster than computing ranks.
    """
    value = rank_value(least)
    return (x > value) | ((x == value) & (ids <= rank_id(least)))
