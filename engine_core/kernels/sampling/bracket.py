"""Bounds of a row's truncation cutoff.

Every program of the row derives them from what earlier kernels wrote.

y is the binary logarithm of a token's weight, which is 1 for the row's best. `narrow` explains the search.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE, TOP_K, TOP_P
from tandem.engine_core.kernels.sampling.rank import sortable_bits
from tandem.engine_core.kernels.sampling.scratch import NUM_PIVOTS, NUM_STATS

NUM_FIRST_PIVOTS = tl.constexpr(8)
"""Pivots of the first level."""
KEEP_ALL, BY_MASS, BY_RANK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""States of a row: nothing is left to do, or its cutoff is to be found, by mass or by rank (and then mass)."""
MASS, MASS_Y, MASS_Y2, MASS_AHEAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Columns of `SamplingScratch.stats`."""
LOG2_E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(float(1 << 40))
"""The weight of a row's best token in fixed point."""


@triton.jit
def log2_slope(temperature):
    """Return the factor from a logit to the binary logarithm of its weight.

    It is finite for every temperature.
    """
    return tl.minimum(tl.div_rn(LOG2_E, temperature), 1e38)


@triton.jit
def truncation_state(ints_ptr, floats_ptr, row, vocab):
    """Return the state of a row's truncation at its start.

    It is KEEP_ALL, BY_MASS (top-p alone) or BY_RANK (top-k, maybe followed by top-p).
    """
    greedy = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE) == 0.0
    top_k = tl.load(ints_ptr + row * NUM_INTS + TOP_K)
    by_rank = (top_k > 0) & (top_k < vocab)
    by_mass = tl.load(floats_ptr + row * NUM_FLOATS + TOP_P) < 1.0
    return tl.where(greedy, KEEP_ALL, tl.where(by_rank, BY_RANK, tl.where(by_mass, BY_MASS, KEEP_ALL)))


@triton.jit
def log_weights(x, top, slope):
    """Return y of a tile's logits.

    Every kernel computes it by these two operations, so that all compare the same numbers.
    """
    return (x - top) * slope


@triton.jit
def moments(stats_ptr, index, tiles, TILES_PAD: tl.constexpr):
    """Return a row's mass, and the mean and standard deviation of its y.

    Mean and deviation are those under the softmax.
    """
    offsets = tl.arange(0, TILES_PAD)
    mask = offsets < tiles
    tile_ptrs = stats_ptr + (index * tiles + offsets) * NUM_STATS
    total = tl.sum(tl.load(tile_ptrs + MASS, mask=mask, other=0.0), axis=0)
    mean = tl.sum(tl.load(tile_ptrs + MASS_Y, mask=mask, other=0.0), axis=0) / total
    square = tl.sum(tl.load(tile_ptrs + MASS_Y2, mask=mask, other=0.0), axis=0) / total
    return total, mean, tl.sqrt(tl.maximum(square - mean * mean, 1e-6))


@triton.jit
def top_p_mass(top_p, mass):
    """Return the fixed-point mass that top-p keeps.

    It is at least 1, so that the first token always stays.
    """
    return tl.maximum((top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def lowest_log_weight(total, top_p, vocab):
    """Return a y below which there is less mass than top-p may drop.

    This holds for every distribution.
    """
    return tl.log2((1.0 - top_p) * total / vocab) - 0.01


@triton.jit
def bracket(
    pivots_ptr,
    above_ptr,
    index,
    level,
    tiles,
    target,
    low,
    high,
    mass_low,
    COUNT: tl.constexpr,
    TILES_PAD: tl.constexpr,
):
    """Return the interval [low, high) of y in which the cutoff lies.

    Within it the mass above y reaches the target. Returns the ends, low first, then the mass above each.
    """
    j = tl.arange(0, COUNT)
    tile = tl.arange(0, TILES_PAD)
    mass_ptrs = above_ptr + ((index * 2 + level) * tiles + tile[:, None]) * NUM_PIVOTS + j[None, :]
    masses = tl.sum(tl.load(mass_ptrs, mask=(tile < tiles)[:, None], other=0.0), axis=0)
    pivot = tl.load(pivots_ptr + (index * 2 + level) * NUM_PIVOTS + j)
    short = masses < target
    mass_high = tl.max(tl.where(short, masses, 0.0), axis=0)
    mass_low = tl.min(tl.where(short, mass_low, masses), axis=0)
    high = tl.min(tl.where(short, pivot, high), axis=0)
    low = tl.max(tl.where(short, low, pivot), axis=0)
    return low, high, mass_low, mass_high


@triton.jit
def exceeds_capacity(low, mass_low, mass_high, CAPACITY: tl.constexpr):
    """Return true if an interval may hold more tokens than can be gathered.

    Each of its tokens weighs at least 2^low.
    """
    return mass_low - mass_high > CAPACITY * tl.exp2(low)


@triton.jit
def kth_peak(peaks_ptr, index, tiles, k, GROUPS: tl.constexpr, PEAKS_PAD: tl.constexpr):
    """Return the k-th largest group maximum of a row.

    It is -inf if there are fewer groups.
    """
    offsets = tl.arange(0, PEAKS_PAD)
    count = tiles * GROUPS
    x = tl.load(peaks_ptr + index * count + offsets, mask=offsets < count, other=float("-inf"))
    keys = sortable_bits(x)
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    peak = tl.min(tl.where(keys >= low, x, float("inf")), axis=0)
    return tl.where(k > count, float("-inf"), peak)
