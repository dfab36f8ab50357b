"""Exact cutoff of top-k and top-p: the last token in rank that stays.

One Triton program finds it for one row.

Tokens rank by score, equal ones by lower id, as in `kernels.reference.sampling.truncate`; a rank is one integer, and no
two are equal, so a search over integers ends at exactly one token. Weights are added in fixed point, so their sum
does not depend on their order. The search runs over the tokens that `narrow` gathered, held in registers. Where they
are too many (a large top-k, thousands of equal logits) it runs over the whole row, which is slow but as exact.

Two limits of rounding: a weight is right to about 1e-6 of itself, so a cumulative probability that close to top-p may
fall on either side; and logits that differ but round to one score rank by logit at the interval's ends.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.bracket import BY_RANK, KEEP_ALL, ONE, log2_slope, log_weights, top_p_mass
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, NUM_INTS, TEMPERATURE, TOP_K, TOP_P
from tandem.engine_core.kernels.sampling.draw import is_infinite, load_adjusted, load_row_best, scores_of
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.rank import ID_BITS, rank_value, to_rank
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch

FEW_TOKENS = 128
"""Most tokens among which the cutoff is found by comparing all pairs."""
ROW_CHUNK = 4096
"""Tokens that the search over a whole row reads at a time."""


@triton.jit
def _ranks(x, ids, mask, top, temperature, slope):
    """Return the ranks and fixed-point weights of tokens.

    Masked-out tokens rank below everything and weigh nothing.
    """
    ranks = tl.where(mask, to_rank(scores_of(x, top, temperature), ids), NOTHING)
    weights = tl.where(mask, fast_exp2(log_weights(x, top, slope)) * ONE, 0.0).to(tl.int64)
    return ranks, weights


@triton.jit
def _row_ranks(logits_ptr, adjusted_ptr, is_adjusted, first, vocab, top, temperature, slope, CHUNK: tl.constexpr):
    ids = first + tl.arange(0, CHUNK)
    x = load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, ids < vocab)
    return _ranks(x, ids, ids < vocab, top, temperature, slope)


@triton.jit
def _search(ranks, values, low, high, goal):
    """Return the largest t in [low, high] for which values reach the goal.

    The values of the tokens that rank at t or before are summed.
    """
    while low < high:
        # Three sums that do not wait for each other halve the number of rounds.
        step = tl.maximum((high - low + 1) >> 2, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        to_first = tl.sum(tl.where(ranks >= first, values, 0), axis=0) >= goal
        to_second = tl.sum(tl.where(ranks >= second, values, 0), axis=0) >= goal
        to_third = tl.sum(tl.where(ranks >= third, values, 0), axis=0) >= goal
        high = tl.where(to_third, high, tl.where(to_second, third - 1, tl.where(to_first, second - 1, first - 1)))
        low = tl.where(to_third, third, tl.where(to_second, second, tl.where(to_first, first, low)))
    return low


@triton.jit
def _rank_few(ranks, weights, mask, above, target, top_p, top_k, mode):
    """Return the cutoff among a few tokens by comparing all pairs.

    ranks, weights, mask: [N].
    """
    ahead = ranks[None, :] > ranks[:, None]
    kept = mask
    if mode == BY_RANK:
        kept = kept & (tl.sum(ahead.to(tl.int32), axis=1) < top_k)
        above = tl.zeros_like(above)
        weights = tl.where(kept, weights, 0)
        target = top_p_mass(top_p, tl.sum(weights, axis=0))
    if top_p < 1.0:
        before = above + tl.sum(tl.where(ahead, weights[None, :], 0), axis=1)
        kept = kept & (before < target)
    return tl.min(tl.where(kept, ranks, 1 << 62), axis=0)


@triton.jit
def _row_sums(
    logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, first, second, third, COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return three counts or weights of a row's leading tokens.

    These are the tokens of the whole row that rank at `first` or before, and likewise for the others. One pass over the
    row serves all three. COUNT: return counts.
    """
    to_first = tl.zeros([CHUNK], tl.int64)
    to_second = tl.zeros([CHUNK], tl.int64)
    to_third = tl.zeros([CHUNK], tl.int64)
    for start in range(0, vocab, CHUNK):
        ranks, values = _row_ranks(logits_ptr, adjusted_ptr, is_adjusted, start, vocab, top, temperature, slope, CHUNK)
        if COUNT:
            values = tl.full([CHUNK], 1, tl.int64)
        to_first += tl.where(ranks >= first, values, 0)
        to_second += tl.where(ranks >= second, values, 0)
        to_third += tl.where(ranks >= third, values, 0)
    return tl.sum(to_first, axis=0), tl.sum(to_second, axis=0), tl.sum(to_third, axis=0)


@triton.jit
def _search_row(
    logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, low, high, floor, goal, SHIFT: tl.constexpr,
    COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Search over a whole row as `_search` does over gathered tokens.

    low, high: ranks without their last SHIFT bits; floor: least rank that counts.
    """
    while low < high:
        step = tl.maximum((high - low + 1) >> 2, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        to_first, to_second, to_third = _row_sums(
            logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, tl.maximum(first << SHIFT, floor),
            tl.maximum(second << SHIFT, floor), tl.maximum(third << SHIFT, floor), COUNT, CHUNK,
        )  # fmt: skip
        by_first, by_second, by_third = to_first >= goal, to_second >= goal, to_third >= goal
        high = tl.where(by_third, high, tl.where(by_second, third - 1, tl.where(by_first, second - 1, first - 1)))
        low = tl.where(by_third, third, tl.where(by_second, second, tl.where(by_first, first, low)))
    return low


@triton.jit
def _find_in_row(
    logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, floor, goal, COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the largest rank at which the leading tokens of a row reach the goal.

    Ranks from `floor` on count. The score is found first, in some 16 passes over the row, and the id only if several
    tokens have that score.
    """
    key = _search_row(
        logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, floor >> ID_BITS, floor * 0, floor, goal,
        ID_BITS, COUNT, CHUNK,
    )  # fmt: skip
    lowest = tl.maximum(key << ID_BITS, floor)
    above = (key + 1) << ID_BITS
    to_lowest, to_above, _ = _row_sums(
        logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, lowest, above, above, True, CHUNK
    )
    if to_lowest - to_above > 1:
        lowest = _search_row(
            logits_ptr, adjusted_ptr, is_adjusted, vocab, top, temperature, slope, lowest, above - 1, floor, goal, 0,
            COUNT, CHUNK,
        )  # fmt: skip
    return lowest


@triton.jit
def _cutoff_kernel(
    logits_ptr,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    adjusted_ptr,
    touched_ptr,
    state_ptr,
    tile_best_ptr,
    sums_ptr,
    found_ptr,
    found_ids_ptr,
    found_logits_ptr,
    cutoff_ptr,
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
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    mode = tl.load(state_ptr + index)
    top = rank_value(load_row_best(tile_best_ptr, index, tiles, TILES_PAD))
    if (mode == KEEP_ALL) | is_infinite(top):
        tl.store(cutoff_ptr + index, NOTHING)
        return
    temperature = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE)
    top_p = tl.load(floats_ptr + row * NUM_FLOATS + TOP_P)
    top_k = tl.load(ints_ptr + row * NUM_INTS + TOP_K)
    slope = log2_slope(temperature)
    # Read and cleared at once: a load by all threads could come after the store of one of them.
    count = tl.atomic_xchg(found_ptr + index, 0, sem="relaxed")
    slots = tl.arange(0, CAPACITY)
    mask = slots < count
    ids = tl.load(found_ids_ptr + index * CAPACITY + slots, mask=mask, other=0)
    x = tl.load(found_logits_ptr + index * CAPACITY + slots, mask=mask, other=0.0)
    ranks, weights = _ranks(x, ids, mask, top, temperature, slope)
    tile_offsets = tl.arange(0, TILES_PAD)
    tile_mask = tile_offsets < tiles
    sum_ptrs = sums_ptr + (index * tiles + tile_offsets) * 2
    mass = tl.sum((tl.load(sum_ptrs, mask=tile_mask, other=0.0) * ONE).to(tl.int64), axis=0)
    above = tl.sum((tl.load(sum_ptrs + 1, mask=tile_mask, other=0.0) * ONE).to(tl.int64), axis=0)
    target = top_p_mass(top_p, mass)
    gathered = tl.sum(weights, axis=0)
    usable = (count > 0) & (count <= CAPACITY)
    if mode == BY_RANK:
        usable &= count >= top_k
    else:
        usable &= (above < target) & (above + gathered >= target)
    if usable & (count <= FEW):
        few = tl.arange(0, FEW)
        few_ids = tl.load(found_ids_ptr + index * CAPACITY + few, mask=few < count, other=0)
        few_logits = tl.load(found_logits_ptr + index * CAPACITY + few, mask=few < count, other=0.0)
        few_ranks, few_weights = _ranks(few_logits, few_ids, few < count, top, temperature, slope)
        least = _rank_few(few_ranks, few_weights, few < count, above, target, top_p, top_k, mode)
    elif usable:
        high = tl.max(ranks, axis=0)
        least = tl.min(tl.where(mask, ranks, high), axis=0)
        if mode == BY_RANK:
            least = _search(ranks, mask.to(tl.int64), least, high, top_k)
            above = tl.zeros_like(above)
            target = top_p_mass(top_p, tl.sum(tl.where(ranks >= least, weights, 0), axis=0))
        if top_p < 1.0:
            least = _search(ranks, weights, least, high, target - above)
    else:
        raw = logits_ptr + index.to(tl.int64) * logit_stride
        changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
        is_adjusted = tl.load(touched_ptr + index) != 0
        least = to_rank(tl.full([], float("-inf"), tl.float32), tl.full([], vocab, tl.int32))
        if mode == BY_RANK:
            least = _find_in_row(raw, changed, is_adjusted, vocab, top, temperature, slope, least, top_k, True, CHUNK)
        if top_p < 1.0:
            # Summed here again, so that the target comes from the very sums that are compared with it.
            mass, _, _ = _row_sums(
                raw, changed, is_adjusted, vocab, top, temperature, slope, least, least, least, False, CHUNK
            )
            target = top_p_mass(top_p, mass)
            least = _find_in_row(raw, changed, is_adjusted, vocab, top, temperature, slope, least, target, False, CHUNK)
    tl.store(cutoff_ptr + index, least)


def find_cutoff(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Write the rank of the last token of each row that stays.

    It is written to `cutoff`; `found` is zeroed. Reads what `narrow` leaves. A row whose state is KEEP_ALL keeps
    everything: its cutoff is NOTHING.
    """
    logits, adjusted, tiles = batch.logits, scratch.adjusted, scratch.num_tiles
    capacity = scratch.found_ids.shape[1]
    _cutoff_kernel[(len(logits),)](
        logits,
        batch.rows,
        tables.ints,
        tables.floats,
        adjusted,
        scratch.touched,
        scratch.state,
        scratch.tile_best,
        scratch.sums,
        scratch.found,
        scratch.found_ids,
        scratch.found_logits,
        scratch.cutoff,
        logits.stride(0),
        adjusted.stride(0),
        scratch.vocab_size,
        tiles,
        TILES_PAD=triton.next_power_of_2(tiles),
        CAPACITY=capacity,
        FEW=min(FEW_TOKENS, capacity),
        CHUNK=ROW_CHUNK,
        **scratch.launch_options(8),
    )
