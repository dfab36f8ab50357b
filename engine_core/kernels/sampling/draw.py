"""A token drawn from the softmax of every row, in two Triton kernels: the largest logits, then a Gumbel maximum.

score = (logit - largest) / temperature, and the largest sum of score and Gumbel noise is a draw from the softmax
(Gumbel, 1954; Maddison et al., 2014). The second kernel also ends sampling with truncation (`sample_full`), so one
request gets the same token from both. Oracle: `sampling.sampler.sample`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import quotient
from tandem.engine_core.kernels.sampling.bracket import TOP_K, TOP_P, WHOLE, truncation
from tandem.engine_core.kernels.sampling.greedy import (
    ID_MASK,
    NOTHING,
    arrive,
    best_of,
    launch_options,
    load_logits,
    packed_id,
    packed_value,
    publish,
    warps_for,
)
from tandem.engine_core.kernels.sampling.gumbel import gumbel, philox_words
from tandem.engine_core.kernels.sampling.penalties import COLUMNS

DRAW_STEP = 512
"""Tokens whose noise a program computes together: four a thread, as they come out of one counter, in place."""
PLAIN, FIRST, AGAIN, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Turns of a draw: without truncation; of every row but those with top-k, from all that min-p leaves; once more of
those with top-p, from what ranks ahead of the token drawn; of the rows whose cutoff was searched."""
BUSY = 1024
"""Programs from which on a program that draws takes two tiles."""


@triton.jit
def load_best(best, index, tiles, TILES_PAD: tl.constexpr):
    """The packed best of a row, from those of its tiles."""
    places = tl.arange(0, TILES_PAD)
    return tl.max(tl.load(best + index * tiles + places, mask=places < tiles, other=NOTHING), axis=0)


@triton.jit
def is_endless(top):
    """Whether every finite logit is infinitely far from a row's largest, so that there is nothing to draw from."""
    return (top == float("-inf")) | (top == float("inf"))


@triton.jit
def scores_of(x, top, temperature):
    """Rounded as the oracle rounds, so that what ties there ties here too."""
    return quotient(x - top, temperature)


@triton.jit
def load_adjusted(logits, adjusted, is_adjusted, ids, inside):
    """A tile of logits, from where `penalties.adjust` left them. logits, adjusted: pointers to the row."""
    if is_adjusted:  # noqa: SIM108
        x = tl.load(adjusted + ids, mask=inside, other=float("-inf"))
    else:
        x = load_logits(logits, ids, inside)
    return x


@triton.jit
def _limit(cutoff, min_p):
    """The lowest score that stays, the last id that stays at that score, and whether anything is dropped at all."""
    whole = cutoff == NOTHING
    least = tl.where(whole, float("-inf"), packed_value(cutoff))
    bound = tl.where(min_p > 0.0, tl.log(tl.minimum(tl.maximum(min_p, 1e-38), 1.0)), float("-inf"))
    last = tl.where(whole | (bound > least), ID_MASK, packed_id(cutoff))
    return tl.maximum(bound, least), last, (not whole) | (min_p > 0.0)


@triton.jit
def _best_kernel(logits, rows, best, logit_stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(rows + index) == 0:
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + index.to(tl.int64) * logit_stride, ids, ids < vocab)
    tl.store(best + index * tl.num_programs(0) + tile, best_of(x, ids))


@triton.jit
def _draw_kernel(
    logits,
    rows,
    positions,
    ints,
    floats,
    best,
    adjusted,
    touched,
    state,
    cutoff,
    sampled,
    tokens,
    winner,
    arrivals,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if TURN == AGAIN:  # noqa: SIM102
        if tl.load(state + index) != TOP_P:
            return
    if TURN == LAST:  # noqa: SIM102  Turns are told apart when the kernel is compiled.
        if tl.load(state + index) == WHOLE:
            return
    row = tl.load(rows + index).to(tl.int64)
    position = tl.load(positions + index)
    if row == 0:
        if tile == 0:
            publish(sampled, tokens, token_stride, max_len, index, row, position, 0)
        return
    # All loads that need nothing but the row go out together.
    temperature = tl.load(floats + row * COLUMNS)
    seed = tl.load(ints + row * COLUMNS + 4)
    choice = tl.load(ints + row * COLUMNS + 3)
    if TURN == FIRST:  # noqa: SIM102
        if truncation(ints, floats, row, vocab) == TOP_K:
            return
    if TURN != PLAIN:
        changed = adjusted + index.to(tl.int64) * adjusted_stride
        is_adjusted = tl.load(touched + index) != 0
        lowest = tl.full([], NOTHING, tl.int64)
        if TURN != FIRST:
            lowest = tl.load(cutoff + index)
        least, last, truncates = _limit(lowest, tl.load(floats + row * COLUMNS + 2))
    largest = load_best(best, index, tiles, TILES_PAD)
    top = packed_value(largest)
    if (temperature == 0.0) | is_endless(top):
        if tile == 0:
            publish(sampled, tokens, token_stride, max_len, index, row, position, packed_id(largest))
        return
    raw = logits + index.to(tl.int64) * logit_stride
    # A few tokens a thread at a time, so that registers do not keep programs from running side by side.
    highest = tl.full([STEP], float("-inf"), tl.float32)
    choices = tile * BLOCK + tl.arange(0, STEP)
    for first in range(tile * BLOCK, tl.minimum(tile * BLOCK + BLOCK, vocab), STEP):
        ids = first + tl.arange(0, STEP)
        inside = ids < vocab
        if TURN != PLAIN:
            scores = scores_of(load_adjusted(raw, changed, is_adjusted, ids, inside), top, temperature)
            wanted = True
            if truncates:
                inside = inside & ((scores > least) | ((scores == least) & (ids <= last)))
                # Noise is dear, and truncation leaves nothing in most places.
                wanted = tl.max(inside.to(tl.int32), axis=0) > 0
        else:
            scores = scores_of(load_logits(raw, ids, inside), top, temperature)
            wanted = True
        if wanted:
            sums = tl.where(
                inside, scores + gumbel(philox_words(seed, choice, position + 1, first, STEP)), float("-inf")
            )
            higher = sums > highest
            highest = tl.where(higher, sums, highest)
            choices = tl.where(higher, ids, choices)
    offer = best_of(highest, choices)
    drawn = arrive(winner, arrivals, index, offer, tl.num_programs(0))
    if drawn != NOTHING:
        publish(sampled, tokens, token_stride, max_len, index, row, position, packed_id(drawn))


def row_best(logits: Tensor, rows: Tensor, best: Tensor, block: int, pdl: bool) -> None:
    """The packed best token of each tile of each row. best: [B, ceil(V / block)] int64."""
    batch, vocab = logits.shape
    _best_kernel[(triton.cdiv(vocab, block), batch)](
        logits, rows, best, logits.stride(0), vocab, BLOCK=block, **launch_options(pdl, warps_for(block))
    )


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    ints: Tensor,
    floats: Tensor,
    best: Tensor,
    truncated: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    turn: int,
    tokens: Tensor,
    winner: Tensor,
    arrivals: Tensor,
    sampled: Tensor,
    block: int,
    pdl: bool,
) -> None:
    """Draws each row's token, or takes its best where the temperature is 0.

    best: as `row_best` writes it; truncated: None in the turn PLAIN, or (adjusted [>= B, >= V] float32, touched [B]
    int32, state [B] int32, cutoff [B] int64) as `penalties`, `sample_weigh` and `sample_cutoff` leave them. The rest is
    as in `sample_greedy`, the tables as in `penalties`.
    """
    batch, vocab = logits.shape
    tiles = triton.cdiv(vocab, block)
    # A later turn has few rows, whose programs should be short.
    late = turn in (AGAIN.value, LAST.value)
    wide = block * (2 if tiles * batch > BUSY and not late else 1)
    adjusted, touched, state, cutoff = truncated if truncated is not None else (best, best, best, best)
    _draw_kernel[(triton.cdiv(vocab, wide), batch)](
        logits,
        rows,
        positions,
        ints,
        floats,
        best,
        adjusted,
        touched,
        state,
        cutoff,
        sampled,
        tokens,
        winner,
        arrivals,
        logits.stride(0),
        adjusted.stride(0),
        tokens.stride(0),
        tokens.shape[1],
        vocab,
        tiles,
        TILES_PAD=triton.next_power_of_2(tiles),
        BLOCK=wide,
        STEP=min(block, DRAW_STEP),
        TURN=turn,
        **launch_options(pdl, 4),
    )
