"""Where the cutoff of a row must lie, as every program of the row works it out from what the kernels before left.

y is the binary logarithm of a token's weight, which is 1 for the row's best. See `sample_full`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.sampling.greedy import ordered
from tandem.engine_core.kernels.sampling.penalties import COLUMNS

PIVOTS = tl.constexpr(16)
"""Pivots of the second level, and places for those of either."""
FIRST_PIVOTS = tl.constexpr(8)
WHOLE, TOP_P, TOP_K = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What is left to do for a row: nothing, or the search for its cutoff, by mass or by rank (and then mass)."""
STATS = tl.constexpr(4)
"""Sums of a tile: weight, weight times y, weight times y squared, and the weight that ranks ahead of a draw."""
ONE = tl.constexpr(float(1 << 40))
"""The weight of a row's best token in fixed point."""


@triton.jit
def truncation(ints, floats, row, vocab):
    """How a row truncates: WHOLE, TOP_P (alone) or TOP_K (top-p may follow)."""
    greedy = tl.load(floats + row * COLUMNS) == 0.0
    top_k = tl.load(ints + row * COLUMNS + 2)
    by_rank = (top_k > 0) & (top_k < vocab)
    by_mass = tl.load(floats + row * COLUMNS + 1) < 1.0
    return tl.where(greedy, WHOLE, tl.where(by_rank, TOP_K, tl.where(by_mass, TOP_P, WHOLE)))


@triton.jit
def logarithms(x, top, slope):
    """y of a tile. Every kernel computes it by these two operations, so that all compare the same numbers."""
    return (x - top) * slope


@triton.jit
def moments(stats, index, tiles, TILES_PAD: tl.constexpr):
    """Mass of a row, and mean and deviation of y under the softmax."""
    places = tl.arange(0, TILES_PAD)
    at = stats + (index * tiles + places) * STATS
    total = tl.sum(tl.load(at, mask=places < tiles, other=0.0), axis=0)
    mean = tl.sum(tl.load(at + 1, mask=places < tiles, other=0.0), axis=0) / total
    square = tl.sum(tl.load(at + 2, mask=places < tiles, other=0.0), axis=0) / total
    return total, mean, tl.sqrt(tl.maximum(square - mean * mean, 1e-6))


@triton.jit
def share(top_p, mass):
    """The mass that top-p asks for: at least the least there is, so that the first token always stays."""
    return tl.maximum((top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def lowest(total, top_p, vocab):
    """Below this y lies less mass than top-p may drop, whatever the distribution."""
    return tl.log2((1.0 - top_p) * total / vocab) - 0.01


@triton.jit
def bracket(
    pivots, above, index, level, tiles, target, low, high, mass_low, COUNT: tl.constexpr, TILES_PAD: tl.constexpr
):
    """Where the mass above y reaches the target: y in [low, high), and the mass above either end."""
    j = tl.arange(0, COUNT)
    tile = tl.arange(0, TILES_PAD)
    at = above + ((index * 2 + level) * tiles + tile[:, None]) * PIVOTS + j[None, :]
    masses = tl.sum(tl.load(at, mask=(tile < tiles)[:, None], other=0.0), axis=0)
    pivot = tl.load(pivots + (index * 2 + level) * PIVOTS + j)
    short = masses < target
    mass_high = tl.max(tl.where(short, masses, 0.0), axis=0)
    mass_low = tl.min(tl.where(short, mass_low, masses), axis=0)
    high = tl.min(tl.where(short, pivot, high), axis=0)
    low = tl.max(tl.where(short, low, pivot), axis=0)
    return low, high, mass_low, mass_high


@triton.jit
def too_many(low, mass_low, mass_high, CAPACITY: tl.constexpr):
    """Whether the interval may hold more tokens than can be gathered: each of them weighs at least 2^low."""
    return mass_low - mass_high > CAPACITY * tl.exp2(low)


@triton.jit
def kth_peak(peaks, index, tiles, k, GROUPS: tl.constexpr, PEAKS_PAD: tl.constexpr):
    """The k-th largest group maximum of a row, or -inf if there are fewer groups."""
    places = tl.arange(0, PEAKS_PAD)
    count = tiles * GROUPS
    x = tl.load(peaks + index * count + places, mask=places < count, other=float("-inf"))
    keys = ordered(x)
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    peak = tl.min(tl.where(keys >= low, x, float("inf")), axis=0)
    return tl.where(k > count, float("-inf"), peak)
