"""Tokens drawn from the softmax of every row, in two Triton kernels.

The first finds the largest logits, the second a Gumbel maximum.

score = (logit - largest) / temperature, and the largest sum of score and Gumbel noise is a draw from the softmax
(Gumbel, 1954; Maddison et al., 2014). The second kernel also ends sampling with truncation (see `narrow`), so a request
gets the same token from both. Oracle: `kernels.reference.sampling.sample`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import quotient
from tandem.engine_core.kernels.sampling.bracket import BY_MASS, BY_RANK, KEEP_ALL, truncation_state
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE
from tandem.engine_core.kernels.sampling.gumbel import gumbel, philox_words
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.rank import (
    ID_MASK,
    best_of,
    combine_tiles,
    judge,
    load_logits,
    rank_id,
    rank_value,
    token_of,
    write_token,
)
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch, num_warps_for

CHOICE = tl.constexpr(INT_COLUMNS.index("choice"))
SEED = tl.constexpr(INT_COLUMNS.index("seed"))
MIN_P = tl.constexpr(FLOAT_COLUMNS.index("min_p"))

DRAW_STEP = 512
"""Tokens whose noise a program computes together: four a thread, as they come out of one counter, in place."""
UNTRUNCATED, FIRST, RETRY, FINAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Turns of a draw. UNTRUNCATED: no row truncates. FIRST: every row but those with top-k, from all that min-p leaves.
RETRY: the rows with top-p again, from what ranks ahead of the token drawn. FINAL: rows with a known cutoff."""
BUSY = 1024
"""Number of programs above which a program that draws takes two tiles."""


@triton.jit
def load_row_best(tile_best_ptr, index, tiles, TILES_PAD: tl.constexpr):
    """Return the best rank of a row, from those of its tiles."""
    offsets = tl.arange(0, TILES_PAD)
    return tl.max(tl.load(tile_best_ptr + index * tiles + offsets, mask=offsets < tiles, other=NOTHING), axis=0)


@triton.jit
def is_infinite(top):
    """Return true if a row's largest logit is infinite or NaN.

    Every finite logit is then infinitely far from it, so that there is nothing to draw.
    """
    return (top == float("-inf")) | (top == float("inf")) | (top != top)


@triton.jit
def scores_of(x, top, temperature):
    """Return the scores of logits, rounded as the oracle rounds them.

    So logits that tie in the oracle tie here too.
    """
    return quotient(x - top, temperature)


@triton.jit
def load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, mask):
    """Load a tile of logits from where `penalties.adjust` left them.

    logits_ptr, adjusted_ptr: start of the row.
    """
    if is_adjusted:
        x = tl.load(adjusted_ptr + ids, mask=mask, other=float("-inf"))
    else:
        x = load_logits(logits_ptr, ids, mask)
    return x


@triton.jit
def _score_bound(cutoff, min_p):
    """Return the bounds that truncation sets on scores and ids.

    They are the lowest score that stays, the last id that stays at that score, and true if anything is dropped.
    """
    keeps_all = cutoff == NOTHING
    least = tl.where(keeps_all, float("-inf"), rank_value(cutoff))
    bound = tl.where(min_p > 0.0, tl.log(tl.minimum(tl.maximum(min_p, 1e-38), 1.0)), float("-inf"))
    last = tl.where(keeps_all | (bound > least), ID_MASK, rank_id(cutoff))
    return tl.maximum(bound, least), last, (not keeps_all) | (min_p > 0.0)


@triton.jit
def _tile_best_kernel(logits_ptr, rows_ptr, tile_best_ptr, logit_stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    wait_for_previous(PDL)
    if tl.load(rows_ptr + index) == 0:
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr + index.to(tl.int64) * logit_stride, ids, ids < vocab)
    best = best_of(x, ids)
    tl.store(tile_best_ptr + index * tl.num_programs(0) + tile, judge(best, rank_value(best)))


@triton.jit
def _draw_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    ints_ptr,
    floats_ptr,
    tile_best_ptr,
    adjusted_ptr,
    touched_ptr,
    state_ptr,
    cutoff_ptr,
    sampled_ptr,
    tokens_ptr,
    lengths_ptr,
    winner_ptr,
    arrivals_ptr,
    logit_stride,
    adjusted_stride,
    token_stride,
    max_len,
    vocab,
    tiles,
    TILES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    wait_for_previous(PDL)
    if TURN == RETRY:  # noqa: SIM102
        if tl.load(state_ptr + index) != BY_MASS:
            return
    if TURN == FINAL:  # noqa: SIM102  Turns are distinguished at compile time.
        if tl.load(state_ptr + index) == KEEP_ALL:
            return
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    if row == 0:
        if tile == 0:
            write_token(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len, index, row, position, 0)
        return
    # All loads that depend only on the row are issued together.
    temperature = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE)
    seed = tl.load(ints_ptr + row * NUM_INTS + SEED)
    choice = tl.load(ints_ptr + row * NUM_INTS + CHOICE)
    if TURN == FIRST:  # noqa: SIM102
        if truncation_state(ints_ptr, floats_ptr, row, vocab) == BY_RANK:
            return
    if TURN != UNTRUNCATED:
        changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
        is_adjusted = tl.load(touched_ptr + index) != 0
        cutoff = tl.full([], NOTHING, tl.int64)
        if TURN != FIRST:
            cutoff = tl.load(cutoff_ptr + index)
        least, last, truncates = _score_bound(cutoff, tl.load(floats_ptr + row * NUM_FLOATS + MIN_P))
    largest = load_row_best(tile_best_ptr, index, tiles, TILES_PAD)
    top = rank_value(largest)
    if (temperature == 0.0) | is_infinite(top):
        if tile == 0:
            write_token(
                sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len, index, row, position, token_of(largest)
            )
        return
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    # A few tokens a thread at a time, so that registers do not keep programs from running side by side.
    highest = tl.full([STEP], float("-inf"), tl.float32)
    choices = tile * BLOCK + tl.arange(0, STEP)
    for first in range(tile * BLOCK, tl.minimum(tile * BLOCK + BLOCK, vocab), STEP):
        ids = first + tl.arange(0, STEP)
        mask = ids < vocab
        if TURN != UNTRUNCATED:
            scores = scores_of(load_adjusted(raw, changed, is_adjusted, ids, mask), top, temperature)
            wanted = True
            if truncates:
                mask = mask & ((scores > least) | ((scores == least) & (ids <= last)))
                # Noise is expensive, and truncation leaves nothing in most steps.
                wanted = tl.max(mask.to(tl.int32), axis=0) > 0
        else:
            scores = scores_of(load_logits(raw, ids, mask), top, temperature)
            wanted = True
        if wanted:
            sums = tl.where(mask, scores + gumbel(philox_words(seed, choice, position + 1, first, STEP)), float("-inf"))
            higher = sums > highest
            highest = tl.where(higher, sums, highest)
            choices = tl.where(higher, ids, choices)
    offer = best_of(highest, choices)
    drawn = combine_tiles(winner_ptr, arrivals_ptr, index, offer, tl.num_programs(0))
    if drawn != NOTHING:
        write_token(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len, index, row, position, rank_id(drawn))


def row_best(batch: SamplingBatch, scratch: SamplingScratch) -> None:
    """Write the best rank of each tile of each row to `tile_best`."""
    logits = batch.logits
    _tile_best_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        scratch.tile_best,
        logits.stride(0),
        scratch.vocab_size,
        BLOCK=scratch.tile,
        **scratch.launch_options(num_warps_for(scratch.tile)),
    )


def draw(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch, turn: int) -> None:
    """Draw each row's token, or take its best where the temperature is 0.

    A row without a distribution yields -1 (see `rank`). Reads `tile_best` and, in every turn but UNTRUNCATED,
    `adjusted`, `touched`, `state` and `cutoff`. Writes the tokens to `batch.sampled` and to the token table, which gets
    0 for -1, and the rows' new lengths.
    """
    logits, tokens = batch.logits, tables.tokens
    rows, tiles = len(logits), scratch.num_tiles
    # A later turn has few rows, whose programs should be short.
    late = turn in (RETRY.value, FINAL.value)
    block = scratch.tile * (2 if tiles * rows > BUSY and not late else 1)
    _draw_kernel[(triton.cdiv(scratch.vocab_size, block), rows)](
        logits,
        batch.rows,
        batch.positions,
        tables.ints,
        tables.floats,
        scratch.tile_best,
        scratch.adjusted,
        scratch.touched,
        scratch.state,
        scratch.cutoff,
        batch.sampled,
        tokens,
        tables.lengths,
        scratch.winner,
        scratch.arrivals,
        logits.stride(0),
        scratch.adjusted.stride(0),
        tokens.stride(0),
        tokens.shape[1],
        scratch.vocab_size,
        tiles,
        TILES_PAD=triton.next_power_of_2(tiles),
        BLOCK=block,
        STEP=min(scratch.tile, DRAW_STEP),
        TURN=turn,
        **scratch.launch_options(4),
    )
