"""Candidates for the cutoff of top-k and top-p without sorting the vocabulary.

Three kernels narrow down the tokens among which the cutoff lies, and a fourth (`cutoff`) finds it exactly. Let y be the
binary logarithm of a token's weight, which is 1 for the row's best. The cutoff is searched as follows.

- Top-k: the k-th largest of the maxima of small groups of tokens is a lower bound of the k-th largest logit, and only
  few tokens are above it. Top-p after it needs those tokens alone.
- Top-p: the masses above 8 pivots give an interval of y in which the cutoff lies. The pivots lie around a guess: under
  the softmax the y of Gaussian logits are Gaussian again, so their mean and deviation, summed by an earlier pass, give
  the quantile. If the interval may hold too many tokens, 16 more pivots divide it evenly.
- The tokens of the interval are gathered, with the exact mass above it.

Pivots and guesses only decide how many tokens are gathered, never which are kept. A sum of weights is taken in float32
within a tile, in a fixed order, and in fixed point across tiles, so a row's result depends neither on the batch nor on
the order of programs. Rows whose state is KEEP_ALL (`top_p_rejection`) skip all of this. min-p is a bound on the score,
applied in the draw.
Papers: Holtzman et al., 2020 (top-p); Nguyen et al., 2024 (min-p). Oracle: `kernels.reference.sampling.truncate`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import at_least, fast_exp2
from tandem.engine_core.kernels.sampling.bracket import (
    BY_RANK,
    KEEP_ALL,
    NUM_FIRST_PIVOTS,
    bracket,
    exceeds_capacity,
    kth_peak,
    log2_slope,
    log_weights,
    lowest_log_weight,
    moments,
)
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE, TOP_K, TOP_P
from tandem.engine_core.kernels.sampling.draw import is_infinite, load_adjusted, load_row_best
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.rank import rank_value
from tandem.engine_core.kernels.sampling.scratch import NUM_PIVOTS, SamplingScratch, num_warps_for


@triton.jit
def _store_masses(y, weights, pivots_ptr, above_ptr, index, level, tile, tiles, pivot, j: tl.constexpr):
    row_level = index * 2 + level
    mass = tl.sum(at_least(y, pivot) * weights, axis=0)
    tl.store(above_ptr + (row_level * tiles + tile) * NUM_PIVOTS + j, mass)
    if tile == 0:
        tl.store(pivots_ptr + row_level * NUM_PIVOTS + j, pivot)


@triton.jit
def _pivot_kernel(
    logits_ptr,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    adjusted_ptr,
    touched_ptr,
    state_ptr,
    tile_best_ptr,
    stats_ptr,
    peaks_ptr,
    bound_ptr,
    pivots_ptr,
    above_ptr,
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
    wait_for_previous(PDL)
    mode = tl.load(state_ptr + index)
    if mode == KEEP_ALL:
        return
    row = tl.load(rows_ptr + index).to(tl.int64)
    top = rank_value(load_row_best(tile_best_ptr, index, tiles, TILES_PAD))
    if is_infinite(top):
        return
    slope = log2_slope(tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE))
    if mode == BY_RANK:
        if (LEVEL == 0) & (tile == 0):
            top_k = tl.load(ints_ptr + row * NUM_INTS + TOP_K)
            peak = kth_peak(peaks_ptr, index, tiles, top_k, GROUPS, PEAKS_PAD)
            tl.store(bound_ptr + index, log_weights(peak, top, slope))
        return
    top_p = tl.load(floats_ptr + row * NUM_FLOATS + TOP_P)
    total, mean, deviation = moments(stats_ptr, index, tiles, TILES_PAD)
    floor = lowest_log_weight(total, top_p, vocab)
    # Tukey's lambda distribution stands in for the normal quantile: right to 0.01 deviations up to top-p 0.99.
    dropped = tl.maximum(1.0 - top_p, 1e-7)
    kept = tl.maximum(top_p, 1e-7)
    quantile = 4.91 * (tl.exp2(0.14 * tl.log2(kept)) - tl.exp2(0.14 * tl.log2(dropped)))
    guess = mean - quantile * deviation
    low, high, mass_low, mass_high = floor, 0.0, total, 0.0
    if LEVEL == 1:
        low, high, mass_low, mass_high = bracket(
            pivots_ptr,
            above_ptr,
            index,
            0,
            tiles,
            top_p * total,
            floor,
            float("inf"),
            total,
            NUM_FIRST_PIVOTS,
            TILES_PAD,
        )
        if not exceeds_capacity(low, mass_low, mass_high, CAPACITY):
            return
        high = tl.minimum(high, 0.0)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_adjusted(
        logits_ptr + index.to(tl.int64) * logit_stride,
        adjusted_ptr + index.to(tl.int64) * adjusted_stride,
        tl.load(touched_ptr + index) != 0,
        ids,
        ids < vocab,
    )
    y = log_weights(x, top, slope)
    weights = fast_exp2(y)
    for j in tl.static_range(NUM_PIVOTS if LEVEL == 1 else NUM_FIRST_PIVOTS):
        if LEVEL == 1:
            pivot = high - (high - low) * ((j + 1) / (NUM_PIVOTS + 1))
        elif j < NUM_FIRST_PIVOTS // 2:
            pivot = guess + deviation * (0.012 * 5.0 ** (NUM_FIRST_PIVOTS // 2 - 1 - j))
        else:
            pivot = guess - deviation * (0.012 * 5.0 ** (j - NUM_FIRST_PIVOTS // 2))
        pivot = tl.minimum(tl.maximum(pivot, floor), 0.0)
        _store_masses(y, weights, pivots_ptr, above_ptr, index, LEVEL, tile, tiles, pivot, j)


@triton.jit
def _gather_kernel(
    logits_ptr,
    rows_ptr,
    floats_ptr,
    adjusted_ptr,
    touched_ptr,
    state_ptr,
    tile_best_ptr,
    stats_ptr,
    bound_ptr,
    pivots_ptr,
    above_ptr,
    sums_ptr,
    found_ptr,
    found_ids_ptr,
    found_logits_ptr,
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
    wait_for_previous(PDL)
    mode = tl.load(state_ptr + index)
    if mode == KEEP_ALL:
        return
    row = tl.load(rows_ptr + index).to(tl.int64)
    top = rank_value(load_row_best(tile_best_ptr, index, tiles, TILES_PAD))
    if is_infinite(top):
        return
    slope = log2_slope(tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE))
    if mode == BY_RANK:
        low = tl.load(bound_ptr + index)
        high = tl.full([], float("inf"), tl.float32)
    else:
        top_p = tl.load(floats_ptr + row * NUM_FLOATS + TOP_P)
        total, _, _ = moments(stats_ptr, index, tiles, TILES_PAD)
        target = top_p * total
        low, high, mass_low, mass_high = bracket(
            pivots_ptr,
            above_ptr,
            index,
            0,
            tiles,
            target,
            lowest_log_weight(total, top_p, vocab),
            float("inf"),
            total,
            NUM_FIRST_PIVOTS,
            TILES_PAD,
        )
        if exceeds_capacity(low, mass_low, mass_high, CAPACITY):
            low, high, mass_low, mass_high = bracket(
                pivots_ptr, above_ptr, index, 1, tiles, target, low, high, mass_low, NUM_PIVOTS, TILES_PAD
            )
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    x = load_adjusted(
        logits_ptr + index.to(tl.int64) * logit_stride,
        adjusted_ptr + index.to(tl.int64) * adjusted_stride,
        tl.load(touched_ptr + index) != 0,
        ids,
        mask,
    )
    y = log_weights(x, top, slope)
    weights = fast_exp2(y)
    tl.store(sums_ptr + (index * tiles + tile) * 2, tl.sum(weights, axis=0))
    tl.store(sums_ptr + (index * tiles + tile) * 2 + 1, tl.sum(tl.where(y >= high, weights, 0.0), axis=0))
    wanted = mask & (y >= low) & (y < high)
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        # The order in which tiles are gathered varies; nothing that is done with their tokens depends on it.
        running = tl.cumsum(wanted.to(tl.int32), axis=0)
        slots = tl.atomic_add(found_ptr + index, tl.max(running, axis=0), sem="relaxed") + running - 1
        wanted &= slots < CAPACITY
        offsets = index * CAPACITY + slots
        tl.store(found_ids_ptr + offsets, ids, mask=wanted)
        tl.store(found_logits_ptr + offsets, x, mask=wanted)


def narrow(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Gather the tokens among which each row's cutoff lies.

    Reads what `penalties.adjust` and `top_p_rejection.weigh` leave. Writes `sums`, `found`, `found_ids` and
    `found_logits`, by way of `bound`, `pivots` and `above`.
    """
    logits, adjusted, tile = batch.logits, scratch.adjusted, scratch.tile
    grid, groups = scratch.grid(len(logits)), tile // scratch.group
    tiles_pad = triton.next_power_of_2(scratch.num_tiles)
    sizes = {"TILES_PAD": tiles_pad, "CAPACITY": scratch.found_ids.shape[1], "BLOCK": tile}
    for level in (0, 1):
        _pivot_kernel[grid](
            logits,
            batch.rows,
            tables.ints,
            tables.floats,
            adjusted,
            scratch.touched,
            scratch.state,
            scratch.tile_best,
            scratch.stats,
            scratch.peaks,
            scratch.bound,
            scratch.pivots,
            scratch.above,
            logits.stride(0),
            adjusted.stride(0),
            scratch.vocab_size,
            GROUPS=groups,
            PEAKS_PAD=tiles_pad * groups,
            LEVEL=level,
            **sizes,
            **scratch.launch_options(num_warps_for(tile)),
        )
    _gather_kernel[grid](
        logits,
        batch.rows,
        tables.floats,
        adjusted,
        scratch.touched,
        scratch.state,
        scratch.tile_best,
        scratch.stats,
        scratch.bound,
        scratch.pivots,
        scratch.above,
        scratch.sums,
        scratch.found,
        scratch.found_ids,
        scratch.found_logits,
        logits.stride(0),
        adjusted.stride(0),
        scratch.vocab_size,
        # Without a limit the compiler takes enough registers for one program to fill a multiprocessor.
        maxnreg=80,
        **sizes,
        **scratch.launch_options(num_warps_for(tile, 16)),
    )
