"""Softmax weights of tokens, and their sums.

y is the base-2 logarithm of a token's weight, which is 1 for the best token of its row (or of its tile, if the row's is
not known yet).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.scratch import NOTHING
from tandem.engine_core.kernels.sampling.sort_key import classify_tile, load_logits, rank_value

LOG2_E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(float(1 << 40))
"""The weight of a row's best token in fixed point."""
COARSE, COARSE_BITS = tl.constexpr(8.0), tl.constexpr(0x41000000)
"""A float32 whose unit in the last place, up to the next power of two, is 2^-20, and its bits."""
FINE, FINE_BITS = tl.constexpr(1.5 * 2.0**-18), tl.constexpr(0x36C00000)
"""The same for a unit of 2^-41, at the middle between two powers of two."""
FINE_DIGITS = tl.constexpr(21)
"""Additional binary digits of the fine unit."""
UNIT = tl.constexpr(2.0**-41)
"""Resolution of `segment_masses`."""


@triton.jit
def log2_slope(temperature):
    """Return the factor from a logit to the base-2 logarithm of its weight.

    It is finite for every temperature.
    """
    return tl.minimum(tl.div_rn(LOG2_E, temperature), 1e38)


@triton.jit
def log_weights(x, top, slope):
    """Return y of logits, computed identically in every kernel."""
    return (x - top) * slope


@triton.jit
def load_row_best(tile_best_ptr, index, tiles, TILES_PAD: tl.constexpr):
    """Return the best rank of a row, from those of its tiles."""
    offsets = tl.arange(0, TILES_PAD)
    return tl.max(tl.load(tile_best_ptr + index * tiles + offsets, mask=offsets < tiles, other=NOTHING), axis=0)


@triton.jit
def is_infinite(top):
    """Return true if a row's maximum logit is infinite or NaN.

    All differences to it are then infinite, so there is nothing to draw.
    """
    return (top == float("-inf")) | (top == float("inf")) | (top != top)


@triton.jit
def load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, mask):
    """Load logits from the output of `penalties.adjust`.

    logits_ptr, adjusted_ptr: start of the row.
    """
    if is_adjusted:
        x = tl.load(adjusted_ptr + ids, mask=mask, other=float("-inf"))
    else:
        x = load_logits(logits_ptr, ids, mask)
    return x


@triton.jit
def sums_of_four(x):
    """Add each four adjacent elements, [N / 4].

    They are added in pairs, so the order does not depend on the register layout.
    """
    first, second = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    pairs = first + second
    first, second = tl.split(tl.reshape(pairs, [x.shape[0] // 4, 2]))
    return first + second


@triton.jit
def segment_masses(weights, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr):
    """Sum the weights of each segment to multiples of UNIT, [SEGMENTS] int64.

    The sums are integers, so they do not depend on the kernel that adds them up, and count four weights at a time,
    which are added as floats before. A conversion to int64 is slow, so the mantissas of two floats take a sum's upper
    and lower digits; each has an error of half a UNIT.

    weights: [SEGMENTS * SEGMENT] float32, from 0 to 1; SEGMENT: at most 1,024.
    """
    tl.static_assert(SEGMENT <= 1024, "the mantissas' sums would exceed an int32")
    fours = sums_of_four(weights)
    coarse = fours + COARSE
    fine = (fours - (coarse - COARSE)) + FINE
    upper = coarse.to(tl.int32, bitcast=True) - COARSE_BITS
    lower = fine.to(tl.int32, bitcast=True) - FINE_BITS
    # Reduce both at once, so that the threads synchronize only once.
    sums = tl.sum(tl.reshape(tl.join(upper, lower), [SEGMENTS, SEGMENT // 4, 2]), axis=1)
    upper, lower = tl.split(sums)
    return (upper.to(tl.int64) << FINE_DIGITS) + lower.to(tl.int64)


@triton.jit
def store_masses(masses_ptr, x, best, temperature, tile, SEGMENT: tl.constexpr):
    """Store the masses of a tile's segments, relative to the tile's best logit.

    masses_ptr: of the row; best: that logit.
    """
    count: tl.constexpr = x.shape[0] // SEGMENT
    top = tl.where(best == float("-inf"), 0.0, best)
    weights = fast_exp2(log_weights(x, top, log2_slope(temperature)))
    tl.store(masses_ptr + tile * count + tl.arange(0, count), segment_masses(weights, count, SEGMENT))


@triton.jit
def store_tile(tile_best_ptr, masses_ptr, index, tile, tiles, x, best, largest, temperature, SEGMENT: tl.constexpr):
    """Store a tile's best rank and, if its row draws, the masses of its segments.

    x: logits of the tile's tokens; best: rank of the best one; largest: as in `classify_tile`.
    """
    count: tl.constexpr = x.shape[0] // SEGMENT
    tl.store(tile_best_ptr + index * tiles + tile, classify_tile(best, largest))
    if temperature != 0.0:
        store_masses(masses_ptr + index * tiles * count, x, rank_value(best), temperature, tile, SEGMENT)


@triton.jit
def load_masses(masses_ptr, tile_best_ptr, index, tiles, top, slope, PER_TILE: tl.constexpr, PAD: tl.constexpr):
    """Load the output of `store_masses` for a row.

    Returns the masses of its segments relative to their tiles' best logits, and y of those logits: [PAD] float32 each.
    Padding segments have no mass.
    """
    offsets = tl.arange(0, PAD)
    mask = offsets < tiles * PER_TILE
    ranks = tl.load(tile_best_ptr + index * tiles + offsets // PER_TILE, mask=mask, other=NOTHING)
    masses = tl.load(masses_ptr + index * tiles * PER_TILE + offsets, mask=mask, other=0).to(tl.float32) * UNIT
    return masses, log_weights(tl.where(mask, rank_value(ranks), float("-inf")), top, slope)


@triton.jit
def fixed_total(masses):
    """Sum masses relative to the row's best token, in fixed point.

    masses: float32.
    """
    return tl.sum((masses * ONE).to(tl.int64), axis=0)


@triton.jit
def top_p_mass(top_p, mass):
    """Return the fixed-point mass that top-p keeps.

    It is at least 1, so the first token is always kept.
    """
    return tl.maximum((top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
