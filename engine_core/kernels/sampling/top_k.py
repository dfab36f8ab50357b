"""Search for the last token that top-k keeps, by one program per row.

The k-th largest of the maxima of small groups of tokens is a lower bound of the k-th largest logit, and only few tokens
are above it. They are gathered and searched in registers. If there are too many (a large top-k, thousands of equal
logits) the search runs over the whole row, which is slow but equally exact: a rank is one integer, and ranks are
unique.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.scratch import NOTHING
from tandem.engine_core.kernels.sampling.sort_key import (
    EMPTY,
    ID_BITS,
    rank_value,
    sortable_bits,
    to_rank,
    value_of_bits,
)
from tandem.engine_core.kernels.sampling.weights import fixed_total, load_adjusted, log_weights


@triton.jit
def _advance(low, high, first, second, third, by_first, by_second, by_third):
    """Narrow [low, high] around the largest rank that reaches the target.

    by_first, by_second, by_third: whether the ranks `first` < `second` <= `third` reach it.
    """
    high = tl.where(by_third, high, tl.where(by_second, third - 1, tl.where(by_first, second - 1, first - 1)))
    return tl.where(by_third, third, tl.where(by_second, second, tl.where(by_first, first, low))), high


@triton.jit
def _probes(low, high):
    """Return three ranks that divide (low, high]."""
    step = tl.maximum((high - low + 1) >> 2, 1)
    first = low + step
    second = tl.minimum(first + step, high)
    return first, second, tl.minimum(second + step, high)


@triton.jit
def _search(ranks, low, high, k):
    """Return the largest t in [low, high] that at least k of the ranks reach.

    ranks: [N] int64.
    """
    while low < high:
        # Three independent counts per round halve the number of rounds.
        first, second, third = _probes(low, high)
        by_first = tl.sum((ranks >= first).to(tl.int32), axis=0) >= k
        by_second = tl.sum((ranks >= second).to(tl.int32), axis=0) >= k
        by_third = tl.sum((ranks >= third).to(tl.int32), axis=0) >= k
        low, high = _advance(low, high, first, second, third, by_first, by_second, by_third)
    return low


@triton.jit
def _search_row(logits_ptr, adjusted_ptr, is_adjusted, vocab, low, high, k, CHUNK: tl.constexpr):
    """Search over a whole row like `_search`, in about 22 passes."""
    while low < high:
        first, second, third = _probes(low, high)
        to_first = tl.zeros([CHUNK], tl.int32)
        to_second = tl.zeros([CHUNK], tl.int32)
        to_third = tl.zeros([CHUNK], tl.int32)
        for start in range(0, vocab, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            x = load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, ids < vocab)
            ranks = tl.where(ids < vocab, to_rank(x, ids), NOTHING)
            to_first += (ranks >= first).to(tl.int32)
            to_second += (ranks >= second).to(tl.int32)
            to_third += (ranks >= third).to(tl.int32)
        by_first, by_second = tl.sum(to_first, axis=0) >= k, tl.sum(to_second, axis=0) >= k
        low, high = _advance(low, high, first, second, third, by_first, by_second, tl.sum(to_third, axis=0) >= k)
    return low


@triton.jit
def _kth_peak(peaks_ptr, count, k, PEAKS_PAD: tl.constexpr):
    """Return the k-th largest group maximum of a row, -inf if there are fewer groups."""
    offsets = tl.arange(0, PEAKS_PAD)
    x = tl.load(peaks_ptr + offsets, mask=offsets < count, other=float("-inf"))
    keys = sortable_bits(x).to(tl.int64)
    key = _search(keys, tl.min(keys, axis=0), tl.max(keys, axis=0), k)
    return tl.where(k > count, float("-inf"), value_of_bits(key.to(tl.int32)))


@triton.jit
def _gather(
    logits_ptr,
    adjusted_ptr,
    is_adjusted,
    vocab,
    tile_best_ptr,
    found_ids_ptr,
    found_logits_ptr,
    bound,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gather the tokens whose logits are at least a bound, and return their number.

    Tokens beyond CAPACITY are only counted.
    """
    count = tl.zeros([], tl.int32)
    for start in range(0, vocab, CHUNK):
        if rank_value(tl.load(tile_best_ptr + start // CHUNK)) >= bound:
            ids = start + tl.arange(0, CHUNK)
            x = load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, ids < vocab)
            wanted = (ids < vocab) & (x >= bound)
            running = tl.cumsum(wanted.to(tl.int32), axis=0)
            slots = count + running - 1
            tl.store(found_ids_ptr + slots, ids, mask=wanted & (slots < CAPACITY))
            tl.store(found_logits_ptr + slots, x, mask=wanted & (slots < CAPACITY))
            count += tl.max(running, axis=0)
    # Make the stores of all threads visible to all threads.
    tl.debug_barrier()
    return count


@triton.jit
def _fixed_mass(x, ids, mask, least, top, slope):
    return fixed_total(tl.where(mask & (to_rank(x, ids) >= least), fast_exp2(log_weights(x, top, slope)), 0.0))


@triton.jit
def find_kth(
    logits_ptr,
    adjusted_ptr,
    is_adjusted,
    vocab,
    tile_best_ptr,
    peaks_ptr,
    found_ids_ptr,
    found_logits_ptr,
    best,
    slope,
    k,
    num_peaks,
    PEAKS_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the rank of a row's k-th token, and the mass of the first k.

    All pointers are those of the row; best: rank of its first token; k: less than vocab; CHUNK: tokens per tile. Masses
    are added in fixed point, so the result does not depend on which search found the tokens.
    """
    top = rank_value(best)
    bound = _kth_peak(peaks_ptr, num_peaks, k, PEAKS_PAD)
    count = _gather(
        logits_ptr,
        adjusted_ptr,
        is_adjusted,
        vocab,
        tile_best_ptr,
        found_ids_ptr,
        found_logits_ptr,
        bound,
        CAPACITY,
        CHUNK,
    )
    low = tl.where(bound == float("-inf"), EMPTY, sortable_bits(bound).to(tl.int64) << ID_BITS)
    if count <= CAPACITY:
        slots = tl.arange(0, CAPACITY)
        mask = slots < count
        ids = tl.load(found_ids_ptr + slots, mask=mask, other=0)
        x = tl.load(found_logits_ptr + slots, mask=mask, other=0.0)
        least = _search(tl.where(mask, to_rank(x, ids), NOTHING), low, best, k)
        mass = _fixed_mass(x, ids, mask, least, top, slope)
    else:
        least = _search_row(logits_ptr, adjusted_ptr, is_adjusted, vocab, low, best, k, CHUNK)
        mass = tl.zeros([], tl.int64)
        for start in range(0, vocab, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            x = load_adjusted(logits_ptr, adjusted_ptr, is_adjusted, ids, ids < vocab)
            mass += _fixed_mass(x, ids, ids < vocab, least, top, slope)
    return least, mass
