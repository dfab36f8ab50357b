"""Test of a drawn token against top-p, without knowing the cutoff.

The test compares the mass that ranks ahead of the token with top-p.

The Gumbel maximum of all tokens, if top-p keeps it, is also the maximum of the tokens that top-p keeps; and top-p keeps
a drawn token with a probability of p. If not, nothing that ranks behind the token is kept either, so the next draw is
among the tokens ahead of it, and fails more rarely still. Few rows are left for the search of `narrow`. Rejection
against a rising bound is FlashInfer's idea (Ye et al., 2025); with the noise of a token fixed by the seed, any number
of rounds yields the very token that the search would, except where a mass is within rounding of top-p: the two add up
in different orders.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.bracket import (
    BY_MASS,
    KEEP_ALL,
    MASS,
    MASS_AHEAD,
    MASS_Y,
    MASS_Y2,
    ONE,
    log2_slope,
    log_weights,
    top_p_mass,
    truncation_state,
)
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, TEMPERATURE, TOP_P
from tandem.engine_core.kernels.sampling.draw import is_infinite, load_adjusted, load_row_best, scores_of
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.rank import rank_value, to_rank
from tandem.engine_core.kernels.sampling.scratch import NUM_STATS, SamplingScratch, num_warps_for

FAINT = tl.constexpr(-200.0)
"""A binary logarithm whose power of two is 0 in float32."""


@triton.jit
def _weigh_kernel(
    logits_ptr,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    adjusted_ptr,
    touched_ptr,
    tile_best_ptr,
    sampled_ptr,
    stats_ptr,
    state_ptr,
    cutoff_ptr,
    arrivals_ptr,
    logit_stride,
    adjusted_stride,
    vocab,
    TILES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ACCEPT: tl.constexpr,
    MOMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    wait_for_previous(PDL)
    if not FIRST:  # noqa: SIM102
        if tl.load(state_ptr + index) != BY_MASS:
            return
    # Loads wait for one another as little as possible: a program is short, and waiting is most of its time.
    row = tl.load(rows_ptr + index).to(tl.int64)
    token = tl.load(sampled_ptr + index)
    is_adjusted = tl.load(touched_ptr + index) != 0
    top = rank_value(load_row_best(tile_best_ptr, index, tiles, TILES_PAD))
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_adjusted(raw, changed, is_adjusted, ids, ids < vocab)
    if FIRST:
        mode = tl.where(row == 0, KEEP_ALL, truncation_state(ints_ptr, floats_ptr, row, vocab))
        mode = tl.where((mode == BY_MASS) & is_infinite(top), KEEP_ALL, mode)
        if mode != BY_MASS:
            if tile == 0:
                tl.store(state_ptr + index, mode)
            return
    temperature = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE)
    top_p = tl.load(floats_ptr + row * NUM_FLOATS + TOP_P)
    slope = log2_slope(temperature)
    drawn = load_adjusted(raw, changed, is_adjusted, token, token >= 0)
    y = log_weights(x, top, slope)
    weights = fast_exp2(y)
    stat_ptrs = stats_ptr + (index * tiles + tile) * NUM_STATS
    if FIRST:
        tl.store(stat_ptrs + MASS, tl.sum(weights, axis=0))
    if MOMENTS:
        y = tl.maximum(y, FAINT)
        tl.store(stat_ptrs + MASS_Y, tl.sum(weights * y, axis=0))
        tl.store(stat_ptrs + MASS_Y2, tl.sum(weights * y * y, axis=0))
    ahead = (x > drawn) | ((x == drawn) & (ids < token))
    tl.store(stat_ptrs + MASS_AHEAD, tl.sum(tl.where(ahead, weights, 0.0), axis=0))
    # All stores of this program come before its own arrival; the last one sees those of all.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + index, 1, sem="acq_rel") == tiles - 1:
        tl.atomic_xchg(arrivals_ptr + index, 0, sem="relaxed")
        offsets = tl.arange(0, TILES_PAD)
        tile_mask = offsets < tiles
        all_ptrs = stats_ptr + (index * tiles + offsets) * NUM_STATS
        mass = tl.load(all_ptrs + MASS, mask=tile_mask, other=0.0, cache_modifier=".cg")
        before = tl.load(all_ptrs + MASS_AHEAD, mask=tile_mask, other=0.0, cache_modifier=".cg")
        target = top_p_mass(top_p, tl.sum((mass * ONE).to(tl.int64), axis=0))
        within = tl.sum((before * ONE).to(tl.int64), axis=0) < target
        tl.store(state_ptr + index, tl.where(within & ACCEPT, KEEP_ALL, BY_MASS))
        tl.store(cutoff_ptr + index, to_rank(scores_of(drawn, top, temperature), token) + 1)


def weigh(
    batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch, *, first: bool, last: bool, accept: bool
) -> None:
    """Weigh the tokens that rank ahead of each row's drawn token, `batch.sampled`.

    Writes `state`, for every row if `first`, else for rows whose state is BY_MASS. For rows whose state is BY_MASS
    afterwards it writes `cutoff`, the least rank ahead of the token, and `stats`: the sum of weights and, if `last`, of
    weight times y and times y squared. accept: a token within top-p ends the row's search.
    """
    logits, adjusted, tiles = batch.logits, scratch.adjusted, scratch.num_tiles
    _weigh_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        tables.ints,
        tables.floats,
        adjusted,
        scratch.touched,
        scratch.tile_best,
        batch.sampled,
        scratch.stats,
        scratch.state,
        scratch.cutoff,
        scratch.arrivals,
        logits.stride(0),
        adjusted.stride(0),
        scratch.vocab_size,
        TILES_PAD=triton.next_power_of_2(tiles),
        BLOCK=scratch.tile,
        FIRST=first,
        ACCEPT=accept,
        MOMENTS=last,
        # Four programs a multiprocessor.
        maxnreg=64,
        **scratch.launch_options(num_warps_for(scratch.tile, 16)),
    )
