"""Find the first drawn token that truncation keeps, by one Triton program per row.

Drawing from a superset until truncation keeps the token is a draw from the truncated distribution (rejection sampling;
raising the bound with each rejection is FlashInfer's idea, Ye et al., 2025). With top-p 0.9, one row in 10,000 has no
such token among its four candidates. Such a row is resampled from the tokens ahead of all rejected ones, which include
all kept tokens, further restricted by top-k and min-p. Every draw has its own noise: a segment that won by its noise
would win again, though it may have lost most of its mass.

The first token in rank is always kept, and every rejection leaves fewer tokens, so this terminates. Weights have a
relative error of about 1e-6, so a cumulative probability that close to top-p may fall on either side. Papers: Holtzman
et al., 2020 (top-p); Nguyen et al., 2024 (min-p). Oracle: `kernels.reference.sampling.sample`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE
from tandem.engine_core.kernels.sampling.gumbel_draw import CANDIDATES, CHOICE, DONE, SEED, draw_token
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch
from tandem.engine_core.kernels.sampling.sort_key import EMPTY, rank_id, rank_value, to_rank, write_token
from tandem.engine_core.kernels.sampling.top_k import find_kth
from tandem.engine_core.kernels.sampling.truncation import load_truncation, ranks_at_least
from tandem.engine_core.kernels.sampling.weights import (
    fixed_total,
    load_adjusted,
    load_masses,
    log2_slope,
    log_weights,
    top_p_mass,
)

UNBOUNDED_MASS = tl.constexpr(1 << 62)
"""A mass above that of every row."""
MAX_WARPS = 16
"""Maximum warps of a program, which has an SM to itself except in the largest batches."""


@triton.jit
def _first_kept(
    drawn_ptr,
    tile_best_ptr,
    ahead_ptr,
    counts_ptr,
    tiles,
    top,
    slope,
    top_k,
    top_p,
    least_y,
    target,
    TILES_PAD: tl.constexpr,
):
    """Return the first candidate that truncation keeps, and the best rank of all.

    It is -1 if truncation keeps none. All pointers are those of the row; target: mass that top-p keeps.
    """
    offsets = tl.arange(0, TILES_PAD)
    bests = tl.load(tile_best_ptr + offsets, mask=offsets < tiles, other=NOTHING)
    first = tl.full([], -1, tl.int32)
    foremost = tl.full([], NOTHING, tl.int64)
    for number in tl.static_range(CANDIDATES):
        rank = tl.load(drawn_ptr + number)
        # Written by `prefix_mass`. A candidate that ranks after a dropped one is dropped, too.
        mask = (bests > rank) & (rank > foremost)
        mass = fixed_total(tl.load(ahead_ptr + offsets * CANDIDATES + number, mask=mask, other=0.0))
        count = tl.sum(tl.load(counts_ptr + offsets * CANDIDATES + number, mask=mask, other=0.0), axis=0)
        stays = (rank > foremost) & (log_weights(rank_value(rank), top, slope) >= least_y)
        stays &= (top_p >= 1.0) | (mass < target)
        stays &= (top_k == 0) | (count < top_k)
        first = tl.where(stays & (first < 0), rank_id(rank), first)
        foremost = tl.maximum(foremost, rank)
    return first, foremost


@triton.jit
def _store_prefix_masses(
    logits_ptr,
    adjusted_ptr,
    is_adjusted,
    vocab,
    ahead_ptr,
    top,
    slope,
    least,
    least_y,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the masses of a row's segments, restricted to some tokens.

    These have rank `least` or better, and y of at least least_y. Returns their sum in fixed point.
    """
    count: tl.constexpr = CHUNK // SEGMENT
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, ids < vocab)
        y = log_weights(x, top, slope)
        weights = tl.where(ranks_at_least(x, ids, least) & (y >= least_y), fast_exp2(y), 0.0)
        masses = tl.sum(tl.reshape(weights, [count, SEGMENT]), axis=1)
        tl.store(ahead_ptr + start // SEGMENT + tl.arange(0, count), masses)
        total += fixed_total(masses)
    tl.debug_barrier()
    return total


@triton.jit
def _draw_again(
    logits_ptr,
    adjusted_ptr,
    is_adjusted,
    vocab,
    ahead_ptr,
    num_segments,
    top,
    slope,
    least,
    foremost,
    least_y,
    top_p,
    target,
    seed,
    choice,
    position,
    PAD: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw from the tokens ahead of the best rejected one until truncation keeps one, and return it.

    least: the last rank that top-k keeps.
    """
    offsets = tl.arange(0, PAD)
    token = tl.full([], -1, tl.int32)
    drawn = tl.full([], -1, tl.int32)
    number = tl.full([], CANDIDATES, tl.int32)
    while token < 0:
        least = tl.maximum(least, foremost + 1)
        # The tokens ahead of the drawn one decide whether it is kept; if not, the next one is drawn from them. So one
        # pass does both, except the first, which only prepares a draw.
        mass = _store_prefix_masses(
            logits_ptr, adjusted_ptr, is_adjusted, vocab, ahead_ptr, top, slope, least, least_y, SEGMENT, CHUNK
        )
        if (drawn >= 0) & (mass < target):
            token = drawn
        else:
            masses = tl.load(ahead_ptr + offsets, mask=offsets < num_segments, other=0.0)
            drawn, x = draw_token(
                logits_ptr,
                adjusted_ptr,
                is_adjusted,
                vocab,
                tl.log2(masses),
                top,
                slope,
                least,
                least_y,
                seed,
                choice,
                position,
                number,
                SEGMENT,
            )
            foremost = to_rank(x, drawn)
            number += 1
            if top_p >= 1.0:
                token = drawn
        # All threads must read the masses before they are overwritten.
        tl.debug_barrier()
    return token


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _rejection_resample_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    ints_ptr,
    floats_ptr,
    adjusted_ptr,
    touched_ptr,
    tile_best_ptr,
    row_best_ptr,
    masses_ptr,
    candidates_ptr,
    ahead_ptr,
    counts_ptr,
    retry_masses_ptr,
    peaks_ptr,
    found_ids_ptr,
    found_logits_ptr,
    sampled_ptr,
    tokens_ptr,
    lengths_ptr,
    logit_stride,
    adjusted_stride,
    token_stride,
    max_len,
    vocab,
    tiles,
    TILES_PAD: tl.constexpr,
    PAD: tl.constexpr,
    PER_TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    wait_for_previous(PDL)
    drawn_ptr = candidates_ptr + index * CANDIDATES
    if tl.load(drawn_ptr) == DONE:
        return
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    best = tl.load(row_best_ptr + index)
    top = rank_value(best)
    slope = log2_slope(tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE))
    top_k, top_p, least_y = load_truncation(ints_ptr, floats_ptr, row, vocab)
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
    is_adjusted = tl.load(touched_ptr + index) != 0
    masses, y = load_masses(masses_ptr, tile_best_ptr, index, tiles, top, slope, PER_TILE, PAD)
    target = tl.where(top_p < 1.0, top_p_mass(top_p, fixed_total(masses * fast_exp2(y))), UNBOUNDED_MASS)
    least = tl.full([], EMPTY, tl.int64)
    offset = index * tiles * CANDIDATES
    # Top-p after top-k is relative to the mass that top-k keeps, which is not known yet: this result is recomputed
    # then.
    token, foremost = _first_kept(
        drawn_ptr,
        tile_best_ptr + index * tiles,
        ahead_ptr + offset,
        counts_ptr + offset,
        tiles,
        top,
        slope,
        top_k,
        top_p,
        least_y,
        target,
        TILES_PAD,
    )
    if (top_k > 0) & ((top_p < 1.0) | (token < 0)):
        least, mass = find_kth(
            raw,
            changed,
            is_adjusted,
            vocab,
            tile_best_ptr + index * tiles,
            peaks_ptr + index * tiles * GROUPS,
            found_ids_ptr + index * CAPACITY,
            found_logits_ptr + index * CAPACITY,
            best,
            slope,
            top_k,
            tiles * GROUPS,
            TILES_PAD * GROUPS,
            CAPACITY,
            BLOCK,
        )
        if top_p < 1.0:
            target = top_p_mass(top_p, mass)
            token, foremost = _first_kept(
                drawn_ptr,
                tile_best_ptr + index * tiles,
                ahead_ptr + offset,
                counts_ptr + offset,
                tiles,
                top,
                slope,
                top_k,
                top_p,
                least_y,
                target,
                TILES_PAD,
            )
    if token < 0:
        seed = tl.load(ints_ptr + row * NUM_INTS + SEED)
        choice = tl.load(ints_ptr + row * NUM_INTS + CHOICE)
        token = _draw_again(
            raw,
            changed,
            is_adjusted,
            vocab,
            retry_masses_ptr + index * tiles * PER_TILE,
            tiles * PER_TILE,
            top,
            slope,
            least,
            foremost,
            least_y,
            top_p,
            target,
            seed,
            choice,
            position + 1,
            PAD,
            SEGMENT,
            BLOCK,
        )
    write_token(*(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len), *(index, row, position, token))


def rejection_resample(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Write the token of each row that `gumbel_draw.draw` has left open.

    Outputs are the same. Reads the outputs of `penalties.adjust`, `gumbel_draw.draw` and `prefix_mass`.
    """
    logits, tokens, tile = batch.logits, tables.tokens, scratch.tile
    _rejection_resample_kernel[(len(logits),)](
        logits,
        batch.rows,
        batch.positions,
        tables.ints,
        tables.floats,
        scratch.adjusted,
        scratch.touched,
        scratch.tile_best,
        scratch.row_best,
        scratch.masses,
        scratch.candidates,
        scratch.ahead,
        scratch.counts,
        scratch.retry_masses,
        scratch.peaks,
        scratch.found_ids,
        scratch.found_logits,
        batch.sampled,
        tokens,
        tables.lengths,
        logits.stride(0),
        scratch.adjusted.stride(0),
        tokens.stride(0),
        batch.published_len(tokens),
        scratch.vocab_size,
        scratch.num_tiles,
        **scratch.segment_sizes(),
        GROUPS=tile // scratch.group,
        CAPACITY=scratch.found_ids.shape[1],
        BLOCK=tile,
        maxnreg=64,
        **scratch.launch_options(min(MAX_WARPS, max(1, tile // 256))),
    )
