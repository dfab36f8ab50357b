"""Draw a token from the softmax of every row, in two Triton kernels.

The first computes the maximum of each tile and the mass of each of its segments. The second draws a segment by its mass
and then one of its tokens, each by the Gumbel-max trick: the argmax of log-weight plus noise is a draw in proportion to
the weights (Gumbel, 1954; Maddison et al., 2014). So a row needs noise for its segments and for the tokens of one, not
for its whole vocabulary. `weights` defines y, `sort_key` ranks.

If truncation may drop the token, several candidates are drawn at once, each with its own noise. `prefix_mass` and
`rejection_resample` find the first that truncation keeps. Oracle: `kernels.reference.sampling.sample`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.reference import sampling as reference
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE
from tandem.engine_core.kernels.sampling.gumbel import LN_2, gumbel, philox_words
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch, num_warps_for
from tandem.engine_core.kernels.sampling.sort_key import (
    EMPTY,
    best_of,
    best_of_tile,
    load_logits,
    rank_id,
    rank_value,
    to_rank,
    token_of,
    write_token,
)
from tandem.engine_core.kernels.sampling.truncation import load_truncation, ranks_at_least
from tandem.engine_core.kernels.sampling.weights import (
    is_infinite,
    load_adjusted,
    load_masses,
    load_row_best,
    log2_slope,
    log_weights,
    store_tile,
)

CHOICE = tl.constexpr(INT_COLUMNS.index("choice"))
SEED = tl.constexpr(INT_COLUMNS.index("seed"))
CANDIDATES = tl.constexpr(reference.CANDIDATES)
DONE = tl.constexpr(NOTHING.value)
"""First candidate of a row whose token is written."""
DRAW_WARPS = 4
"""Warps of a program that draws: eight tokens per thread."""


@triton.jit
def _tile_best_kernel(
    logits_ptr,
    rows_ptr,
    floats_ptr,
    tile_best_ptr,
    masses_ptr,
    logit_stride,
    vocab,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    # Issue these loads before anything waits for the row.
    x = load_logits(raw, ids, ids < vocab)
    if row == 0:
        return
    temperature = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE)
    best, largest = best_of_tile(x, raw, tile * BLOCK, vocab)
    store_tile(tile_best_ptr, masses_ptr, index, tile, tiles, x, best, largest, temperature, SEGMENT)


@triton.jit
def draw_token(
    logits_ptr,
    adjusted_ptr,
    is_adjusted,
    vocab,
    log_masses,
    top,
    slope,
    least,
    least_y,
    seed,
    choice,
    position,
    draw,
    SEGMENT: tl.constexpr,
):
    """Draw a token of a row, and return its id and its logit.

    logits_ptr, adjusted_ptr: of the row; log_masses: [PAD], base-2 logarithms of its segments' masses, counting tokens
    of rank `least` or better (EMPTY: all) with y at least least_y; position: of the token; draw: index among the draws
    for this position, each with its own noise.
    """
    words = philox_words(seed, choice, position, 2 * draw, 0, log_masses.shape[0])
    segment = rank_id(best_of(log_masses * LN_2 + gumbel(words), tl.arange(0, log_masses.shape[0])))
    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, ids < vocab)
    y = log_weights(x, top, slope)
    noise = gumbel(philox_words(seed, choice, position, 2 * draw + 1, segment * SEGMENT, SEGMENT))
    stays = (ids < vocab) & ranks_at_least(x, ids, least) & (y >= least_y)
    token = rank_id(best_of(tl.where(stays, y * LN_2 + noise, float("-inf")), ids))
    return token, tl.max(tl.where(ids == token, x, float("-inf")), axis=0)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _draw_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    ints_ptr,
    floats_ptr,
    tile_best_ptr,
    masses_ptr,
    adjusted_ptr,
    touched_ptr,
    row_best_ptr,
    candidates_ptr,
    mass_mode_ptr,
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
    FULL: tl.constexpr,
    PDL: tl.constexpr,
):
    number = tl.program_id(0)
    index = tl.program_id(1)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    largest = load_row_best(tile_best_ptr, index, tiles, TILES_PAD)
    top = rank_value(largest)
    candidate_ptr = candidates_ptr + index * CANDIDATES + number
    # Issue all loads that depend only on the row together.
    temperature = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE)
    seed = tl.load(ints_ptr + row * NUM_INTS + SEED)
    choice = tl.load(ints_ptr + row * NUM_INTS + CHOICE)
    top_k, top_p, least_y = load_truncation(ints_ptr, floats_ptr, row, vocab)
    if (row == 0) | (temperature == 0.0) | is_infinite(top):
        if number == 0:
            token = tl.where(row == 0, 0, token_of(largest))
            write_token(*(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len), *(index, row, position, token))
            if FULL:
                tl.store(candidate_ptr, DONE)
                tl.store(mass_mode_ptr + index, 0)
        return
    needs_weighing = (top_k > 0) | (top_p < 1.0)
    if FULL:  # noqa: SIM102  Kinds of launches are distinguished at compile time.
        if (number > 0) & (not needs_weighing) & (least_y == float("-inf")):
            return  # The row is done with the first candidate, so the others are not read.
    slope = log2_slope(temperature)
    masses, y = load_masses(masses_ptr, tile_best_ptr, index, tiles, top, slope, PER_TILE, PAD)
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
    is_adjusted = (tl.load(touched_ptr + index) != 0) if FULL else False
    token, x = draw_token(
        raw,
        changed,
        is_adjusted,
        vocab,
        y + tl.log2(masses),
        top,
        slope,
        tl.full([], EMPTY, tl.int64),
        float("-inf"),
        seed,
        choice,
        position + 1,
        number,
        SEGMENT,
    )
    settled = True
    if FULL:
        # Truncation always keeps the first token in rank.
        stays = (not needs_weighing) & (log_weights(x, top, slope) >= least_y)
        rank = to_rank(x, token)
        settled = (number == 0) & (stays | (rank == largest))
        tl.store(candidate_ptr, tl.where(settled, DONE, rank))
        if number == 0:
            tl.store(row_best_ptr + index, largest)
            tl.store(mass_mode_ptr + index, tl.where(needs_weighing & (not settled), tl.where(is_adjusted, 2, 1), 0))
    if settled:
        write_token(*(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len), *(index, row, position, token))


def row_best(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Write the best rank and the segment masses of each tile of each row to `tile_best` and `masses`."""
    logits = batch.logits
    _tile_best_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        tables.floats,
        scratch.tile_best,
        scratch.masses,
        logits.stride(0),
        scratch.vocab_size,
        BLOCK=scratch.tile,
        SEGMENT=scratch.segment,
        **scratch.launch_options(num_warps_for(scratch.tile)),
    )


def draw(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch, *, full: bool) -> None:
    """Draw each row's token, or take the argmax if the temperature is 0.

    A row without a distribution yields -1 (see `sort_key`). Reads `tile_best` and `masses`. Writes the tokens to
    `batch.sampled` and to the token table, where -1 becomes 0, and the rows' new lengths.

    full: also reads `adjusted` and `touched`, and writes `candidates`, ranks of tokens that truncation may drop, of
    which the first is DONE if the row's token is written, `mass_mode` and `row_best`. Otherwise truncation is ignored.
    """
    logits, tokens, tiles = batch.logits, tables.tokens, scratch.num_tiles
    _draw_kernel[(CANDIDATES.value if full else 1, len(logits))](
        logits,
        batch.rows,
        batch.positions,
        tables.ints,
        tables.floats,
        scratch.tile_best,
        scratch.masses,
        scratch.adjusted,
        scratch.touched,
        scratch.row_best,
        scratch.candidates,
        scratch.mass_mode,
        batch.sampled,
        tokens,
        tables.lengths,
        logits.stride(0),
        scratch.adjusted.stride(0),
        tokens.stride(0),
        batch.published_len(tokens),
        scratch.vocab_size,
        tiles,
        **scratch.segment_sizes(),
        FULL=full,
        **scratch.launch_options(DRAW_WARPS),
    )
