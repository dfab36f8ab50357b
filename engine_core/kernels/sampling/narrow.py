"""Top-k, top-p and min-p over logits, with no sort of the vocabulary: three kernels narrow down the tokens among which
the cutoff lies, and a fourth (`sample_cutoff`) finds it exactly.

Let y be the binary logarithm of a token's weight, which is 1 for the row's best. The cutoff is searched as follows.

- Top-k: the k-th largest of the maxima of small groups of tokens is a lower bound of the k-th largest logit, and only
  few tokens are above it. Top-p after it needs those tokens alone.
- Top-p: the masses above 8 pivots give an interval of y in which the cutoff lies. The pivots lie around a guess: under
  the softmax the y of Gaussian logits are Gaussian again, so their mean and deviation, which a pass before has summed,
  give the quantile. If the interval may hold too many tokens, 16 more pivots divide it evenly.
- The tokens of the interval are gathered, with the exact mass above it.

Pivots and guesses only decide how many tokens are gathered, never which are kept. A sum of weights is taken in float32
within a tile, in a fixed order, and in fixed point across tiles, so a row's result depends neither on the batch nor on
the order of programs. Rows whose state is WHOLE (`sample_weigh`) skip all of this. min-p is a bound on the score,
applied in the draw.
Papers: Holtzman et al., 2020 (top-p); Nguyen et al., 2024 (min-p). Oracle: `reference_sampling.truncate`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import at_least, fast_exp2
from tandem.engine_core.kernels.sampling.bracket import (
    FIRST_PIVOTS,
    PIVOTS,
    TOP_K,
    WHOLE,
    bracket,
    kth_peak,
    logarithms,
    lowest,
    moments,
    too_many,
)
from tandem.engine_core.kernels.sampling.draw import is_endless, load_adjusted, load_best
from tandem.engine_core.kernels.sampling.greedy import launch_options, packed_value, warps_for
from tandem.engine_core.kernels.sampling.penalties import COLUMNS, log2_slope


@triton.jit
def _store_masses(y, weights, pivots, above, index, level, tile, tiles, pivot, j: tl.constexpr):
    place = index * 2 + level
    mass = tl.sum(at_least(y, pivot) * weights, axis=0)
    tl.store(above + (place * tiles + tile) * PIVOTS + j, mass)
    if tile == 0:
        tl.store(pivots + place * PIVOTS + j, pivot)


@triton.jit
def _pivot_kernel(
    logits,
    rows,
    ints,
    floats,
    adjusted,
    touched,
    state,
    best,
    stats,
    peaks,
    bound,
    pivots,
    above,
    logit_stride,
    adjusted_stride,
    vocab,
    TILES_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    PEAKS_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mode = tl.load(state + index)
    if mode == WHOLE:
        return
    row = tl.load(rows + index).to(tl.int64)
    top = packed_value(load_best(best, index, tiles, TILES_PAD))
    if is_endless(top):
        return
    slope = log2_slope(tl.load(floats + row * COLUMNS))
    if mode == TOP_K:
        if (LEVEL == 0) & (tile == 0):
            peak = kth_peak(peaks, index, tiles, tl.load(ints + row * COLUMNS + 2), GROUPS, PEAKS_PAD)
            tl.store(bound + index, logarithms(peak, top, slope))
        return
    top_p = tl.load(floats + row * COLUMNS + 1)
    total, mean, deviation = moments(stats, index, tiles, TILES_PAD)
    floor = lowest(total, top_p, vocab)
    # Tukey's lambda distribution stands in for the normal quantile: right to 0.01 deviations up to top-p 0.99.
    rest = tl.maximum(1.0 - top_p, 1e-7)
    share = tl.maximum(top_p, 1e-7)
    quantile = 4.91 * (tl.exp2(0.14 * tl.log2(share)) - tl.exp2(0.14 * tl.log2(rest)))
    guess = mean - quantile * deviation
    low, high, mass_low, mass_high = floor, 0.0, total, 0.0
    if LEVEL == 1:
        low, high, mass_low, mass_high = bracket(
            pivots, above, index, 0, tiles, top_p * total, floor, float("inf"), total, FIRST_PIVOTS, TILES_PAD
        )
        if not too_many(low, mass_low, mass_high, CAPACITY):
            return
        high = tl.minimum(high, 0.0)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_adjusted(
        logits + index.to(tl.int64) * logit_stride,
        adjusted + index.to(tl.int64) * adjusted_stride,
        tl.load(touched + index) != 0,
        ids,
        ids < vocab,
    )
    y = logarithms(x, top, slope)
    weights = fast_exp2(y)
    for j in tl.static_range(PIVOTS if LEVEL == 1 else FIRST_PIVOTS):
        if LEVEL == 1:
            pivot = high - (high - low) * ((j + 1) / (PIVOTS + 1))
        elif j < FIRST_PIVOTS // 2:
            pivot = guess + deviation * (0.012 * 5.0 ** (FIRST_PIVOTS // 2 - 1 - j))
        else:
            pivot = guess - deviation * (0.012 * 5.0 ** (j - FIRST_PIVOTS // 2))
        pivot = tl.minimum(tl.maximum(pivot, floor), 0.0)
        _store_masses(y, weights, pivots, above, index, LEVEL, tile, tiles, pivot, j)


@triton.jit
def _gather_kernel(
    logits,
    rows,
    floats,
    adjusted,
    touched,
    state,
    best,
    stats,
    bound,
    pivots,
    above,
    sums,
    found,
    found_ids,
    found_logits,
    logit_stride,
    adjusted_stride,
    vocab,
    TILES_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mode = tl.load(state + index)
    if mode == WHOLE:
        return
    row = tl.load(rows + index).to(tl.int64)
    top = packed_value(load_best(best, index, tiles, TILES_PAD))
    if is_endless(top):
        return
    slope = log2_slope(tl.load(floats + row * COLUMNS))
    if mode == TOP_K:
        low = tl.load(bound + index)
        high = tl.full([], float("inf"), tl.float32)
    else:
        top_p = tl.load(floats + row * COLUMNS + 1)
        total, _, _ = moments(stats, index, tiles, TILES_PAD)
        target = top_p * total
        low, high, mass_low, mass_high = bracket(
            pivots,
            above,
            index,
            0,
            tiles,
            target,
            lowest(total, top_p, vocab),
            float("inf"),
            total,
            FIRST_PIVOTS,
            TILES_PAD,
        )
        if too_many(low, mass_low, mass_high, CAPACITY):
            low, high, mass_low, mass_high = bracket(
                pivots, above, index, 1, tiles, target, low, high, mass_low, PIVOTS, TILES_PAD
            )
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = load_adjusted(
        logits + index.to(tl.int64) * logit_stride,
        adjusted + index.to(tl.int64) * adjusted_stride,
        tl.load(touched + index) != 0,
        ids,
        inside,
    )
    y = logarithms(x, top, slope)
    weights = fast_exp2(y)
    tl.store(sums + (index * tiles + tile) * 2, tl.sum(weights, axis=0))
    tl.store(sums + (index * tiles + tile) * 2 + 1, tl.sum(tl.where(y >= high, weights, 0.0), axis=0))
    wanted = inside & (y >= low) & (y < high)
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        # The order in which tiles are gathered varies; nothing that is done with their tokens depends on it.
        running = tl.cumsum(wanted.to(tl.int32), axis=0)
        slots = tl.atomic_add(found + index, tl.max(running, axis=0), sem="relaxed") + running - 1
        wanted &= slots < CAPACITY
        place = index * CAPACITY + slots
        tl.store(found_ids + place, ids, mask=wanted)
        tl.store(found_logits + place, x, mask=wanted)


def narrow(
    logits: Tensor,
    rows: Tensor,
    ints: Tensor,
    floats: Tensor,
    adjusted: Tensor,
    touched: Tensor,
    state: Tensor,
    best: Tensor,
    stats: Tensor,
    peaks: Tensor,
    bound: Tensor,
    pivots: Tensor,
    above: Tensor,
    sums: Tensor,
    found: Tensor,
    found_ids: Tensor,
    found_logits: Tensor,
    block: int,
    group: int,
    pdl: bool,
) -> None:
    """Gathers the tokens among which each row's cutoff lies.

    Inputs as `penalties.adjust` leaves them. bound: [B] float32; pivots: [B, 2, 16] float32; above: [B, 2, T, 16]
    float32; sums: [B, T, 2] float32, the mass of each tile and that above the interval; found: [B] int32, zeros
    before, how many tokens the interval holds; found_ids, found_logits: [B, capacity] int32 and float32.
    """
    batch, vocab = logits.shape
    tiles = triton.cdiv(vocab, block)
    shared = {"TILES_PAD": triton.next_power_of_2(tiles), "CAPACITY": found_ids.shape[1], "BLOCK": block}
    strides = (logits.stride(0), adjusted.stride(0), vocab)
    groups = block // group
    peaks_pad = triton.next_power_of_2(tiles) * groups
    options = launch_options(pdl, warps_for(block))
    known = (logits, rows, ints, floats, adjusted, touched, state, best, stats)
    for level in (0, 1):
        _pivot_kernel[(tiles, batch)](
            *known,
            *(peaks, bound, pivots, above),
            *strides,
            GROUPS=groups,
            PEAKS_PAD=peaks_pad,
            LEVEL=level,
            **shared,
            **options,
        )
    places = (found, found_ids, found_logits)
    # The compiler would take so many registers that one program filled a multiprocessor.
    options = launch_options(pdl, warps_for(block, 16)) | {"maxnreg": 80}
    _gather_kernel[(tiles, batch)](
        logits, rows, *known[3:], bound, pivots, above, sums, *places, *strides, **shared, **options
    )
