"""The exact cutoff of top-k and top-p: the last token in rank that stays. One Triton program a row.

Tokens rank by score, equal ones by lower id, as in `reference_sampling.truncate`; value and id are packed into one
integer, all different, so a bisection over integers ends at exactly one token. Weights are added in fixed point, so
their sum does not depend on their order. The search runs over the tokens that `sample_full` gathered, held in
registers. Where they are too many (a large top-k, thousands of equal logits) it runs over the whole row: slow, and as
exact.

Two limits of rounding: a weight is right to about 1e-6 of itself, so a cumulative probability that close to top-p may
fall on either side; and logits that differ but round to one score rank by logit at the interval's ends.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.bracket import ONE, TOP_K, WHOLE, logarithms, share
from tandem.engine_core.kernels.sampling.draw import is_endless, load_adjusted, load_best, scores_of
from tandem.engine_core.kernels.sampling.greedy import NOTHING, launch_options, pack, packed_value
from tandem.engine_core.kernels.sampling.penalties import COLUMNS, log2_slope

FEW_TOKENS = 128
"""Tokens of which each is compared with each."""
ROW_CHUNK = 4096
"""Tokens that the search over a whole row looks at together."""


@triton.jit
def _ranks(x, ids, inside, top, temperature, slope):
    """Packed ranks and fixed-point weights; what is outside ranks below everything and weighs nothing."""
    packed = tl.where(inside, pack(scores_of(x, top, temperature), ids), NOTHING)
    weights = tl.where(inside, fast_exp2(logarithms(x, top, slope)) * ONE, 0.0).to(tl.int64)
    return packed, weights


@triton.jit
def _row_ranks(logits, adjusted, is_adjusted, first, vocab, top, temperature, slope, CHUNK: tl.constexpr):
    ids = first + tl.arange(0, CHUNK)
    x = load_adjusted(logits, adjusted, is_adjusted, ids, ids < vocab)
    return _ranks(x, ids, ids < vocab, top, temperature, slope)


@triton.jit
def _search(packed, values, low, high, goal):
    """The largest t in [low, high] for which the values of what ranks at t or before reach the goal."""
    while low < high:
        # Three sums that do not wait for each other halve the number of rounds.
        step = tl.maximum((high - low + 1) >> 2, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        to_first = tl.sum(tl.where(packed >= first, values, 0), axis=0) >= goal
        to_second = tl.sum(tl.where(packed >= second, values, 0), axis=0) >= goal
        to_third = tl.sum(tl.where(packed >= third, values, 0), axis=0) >= goal
        high = tl.where(to_third, high, tl.where(to_second, third - 1, tl.where(to_first, second - 1, first - 1)))
        low = tl.where(to_third, third, tl.where(to_second, second, tl.where(to_first, first, low)))
    return low


@triton.jit
def _rank_few(packed, weights, inside, above, target, top_p, top_k, mode):
    """The cutoff among a few tokens, each compared with each. packed, weights, inside: [N]."""
    ahead = packed[None, :] > packed[:, None]
    kept = inside
    if mode == TOP_K:
        kept = kept & (tl.sum(ahead.to(tl.int32), axis=1) < top_k)
        above = tl.zeros_like(above)
        weights = tl.where(kept, weights, 0)
        target = share(top_p, tl.sum(weights, axis=0))
    if top_p < 1.0:
        before = above + tl.sum(tl.where(ahead, weights[None, :], 0), axis=1)
        kept = kept & (before < target)
    return tl.min(tl.where(kept, packed, 1 << 62), axis=0)


@triton.jit
def _row_sum(
    logits, adjusted, is_adjusted, vocab, top, temperature, slope, least, COUNT: tl.constexpr, CHUNK: tl.constexpr
):
    """Over a whole row, how many tokens rank at `least` or before, or their weight."""
    total = tl.zeros([CHUNK], tl.int64)
    for first in range(0, vocab, CHUNK):
        packed, weights = _row_ranks(logits, adjusted, is_adjusted, first, vocab, top, temperature, slope, CHUNK)
        if COUNT:
            total += (packed >= least).to(tl.int64)
        else:
            total += tl.where(packed >= least, weights, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _search_row(
    logits, adjusted, is_adjusted, vocab, top, temperature, slope, low, high, goal, COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """`_search` over a whole row."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reached = _row_sum(logits, adjusted, is_adjusted, vocab, top, temperature, slope, middle, COUNT, CHUNK)
        low = tl.where(reached >= goal, middle, low)
        high = tl.where(reached >= goal, high, middle - 1)
    return low


@triton.jit
def _cutoff_kernel(
    logits,
    rows,
    ints,
    floats,
    adjusted,
    touched,
    state,
    best,
    sums,
    found,
    found_ids,
    found_logits,
    cutoff,
    logit_stride,
    adjusted_stride,
    vocab,
    tiles,
    TILES_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + index).to(tl.int64)
    mode = tl.load(state + index)
    top = packed_value(load_best(best, index, tiles, TILES_PAD))
    if (mode == WHOLE) | is_endless(top):
        tl.store(cutoff + index, NOTHING)
        return
    temperature = tl.load(floats + row * COLUMNS)
    top_p = tl.load(floats + row * COLUMNS + 1)
    top_k = tl.load(ints + row * COLUMNS + 2)
    slope = log2_slope(temperature)
    # Read and cleared at once: a load by all threads could come after the store of one of them.
    count = tl.atomic_xchg(found + index, 0, sem="relaxed")
    slots = tl.arange(0, CAPACITY)
    inside = slots < count
    ids = tl.load(found_ids + index * CAPACITY + slots, mask=inside, other=0)
    x = tl.load(found_logits + index * CAPACITY + slots, mask=inside, other=0.0)
    packed, weights = _ranks(x, ids, inside, top, temperature, slope)
    places = tl.arange(0, TILES_PAD)
    at = sums + (index * tiles + places) * 2
    mass = tl.sum((tl.load(at, mask=places < tiles, other=0.0) * ONE).to(tl.int64), axis=0)
    above = tl.sum((tl.load(at + 1, mask=places < tiles, other=0.0) * ONE).to(tl.int64), axis=0)
    target = share(top_p, mass)
    gathered = tl.sum(weights, axis=0)
    usable = (count > 0) & (count <= CAPACITY)
    if mode == TOP_K:
        usable &= count >= top_k
    else:
        usable &= (above < target) & (above + gathered >= target)
    if usable & (count <= FEW):
        few = tl.arange(0, FEW)
        few_ids = tl.load(found_ids + index * CAPACITY + few, mask=few < count, other=0)
        few_logits = tl.load(found_logits + index * CAPACITY + few, mask=few < count, other=0.0)
        few_packed, few_weights = _ranks(few_logits, few_ids, few < count, top, temperature, slope)
        least = _rank_few(few_packed, few_weights, few < count, above, target, top_p, top_k, mode)
    elif usable:
        high = tl.max(packed, axis=0)
        least = tl.min(tl.where(inside, packed, high), axis=0)
        if mode == TOP_K:
            least = _search(packed, inside.to(tl.int64), least, high, top_k)
            above = tl.zeros_like(above)
            target = share(top_p, tl.sum(tl.where(packed >= least, weights, 0), axis=0))
        if top_p < 1.0:
            least = _search(packed, weights, least, high, target - above)
    else:
        raw = logits + index.to(tl.int64) * logit_stride
        changed = adjusted + index.to(tl.int64) * adjusted_stride
        is_adjusted = tl.load(touched + index) != 0
        least = pack(tl.full([], float("-inf"), tl.float32), tl.full([], vocab, tl.int32))
        high = pack(tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32))
        if mode == TOP_K:
            least = _search_row(
                raw, changed, is_adjusted, vocab, top, temperature, slope, least, high, top_k, True, CHUNK
            )
        if top_p < 1.0:
            # Summed here anew, so that the share is reached by the very sums that are compared with it.
            mass = _row_sum(raw, changed, is_adjusted, vocab, top, temperature, slope, least, False, CHUNK)
            target = share(top_p, mass)
            least = _search_row(
                raw, changed, is_adjusted, vocab, top, temperature, slope, least, high, target, False, CHUNK
            )
    tl.store(cutoff + index, least)


def find_cutoff(
    logits: Tensor,
    rows: Tensor,
    ints: Tensor,
    floats: Tensor,
    adjusted: Tensor,
    touched: Tensor,
    state: Tensor,
    best: Tensor,
    sums: Tensor,
    found: Tensor,
    found_ids: Tensor,
    found_logits: Tensor,
    cutoff: Tensor,
    block: int,
    pdl: bool,
) -> None:
    """Writes cutoff [B] int64, the packed rank of the last token of each row that stays, and zeroes found.

    Inputs as `sample_full.narrow` leaves them. A row whose state is WHOLE keeps everything.
    """
    batch, vocab = logits.shape
    tiles = triton.cdiv(vocab, block)
    _cutoff_kernel[(batch,)](
        logits,
        rows,
        ints,
        floats,
        adjusted,
        touched,
        state,
        best,
        sums,
        found,
        found_ids,
        found_logits,
        cutoff,
        logits.stride(0),
        adjusted.stride(0),
        vocab,
        tiles,
        TILES_PAD=triton.next_power_of_2(tiles),
        CAPACITY=found_ids.shape[1],
        FEW=min(FEW_TOKENS, found_ids.shape[1]),
        CHUNK=ROW_CHUNK,
        **launch_options(pdl, 8),
    )
