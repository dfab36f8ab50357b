"""Whether a drawn token lies within top-p: the mass that ranks ahead of it decides, and no cutoff has to be known.

The Gumbel maximum of all tokens, if top-p keeps it, is that of the tokens that top-p keeps; and it keeps a drawn token
with a probability of p. If not, nothing that ranks behind the token is kept either, so the next draw is among the
tokens ahead of it, and fails more rarely still. Few rows are left for the search of `sample_full`. Rejection against a
rising bound is FlashInfer's idea (Ye et al., 2025); with the noise of a token fixed by the seed, any number of rounds
yields the very token that the search would, but where a mass is within rounding of top-p: the two add up in different
orders.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import fast_exp2
from tandem.engine_core.kernels.sampling.bracket import ONE, STATS, TOP_P, WHOLE, logarithms, share, truncation
from tandem.engine_core.kernels.sampling.draw import is_endless, load_adjusted, load_best, scores_of
from tandem.engine_core.kernels.sampling.greedy import launch_options, pack, packed_value, warps_for
from tandem.engine_core.kernels.sampling.penalties import COLUMNS, log2_slope

FAINT = tl.constexpr(-200.0)
"""A binary logarithm whose power of two is 0 in float32."""


@triton.jit
def _weigh_kernel(
    logits,
    rows,
    ints,
    floats,
    adjusted,
    touched,
    best,
    sampled,
    stats,
    state,
    cutoff,
    arrivals,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not FIRST:  # noqa: SIM102
        if tl.load(state + index) != TOP_P:
            return
    # Loads wait for one another as little as can be: a program is short, and waiting is most of its time.
    row = tl.load(rows + index).to(tl.int64)
    token = tl.load(sampled + index)
    is_adjusted = tl.load(touched + index) != 0
    top = packed_value(load_best(best, index, tiles, TILES_PAD))
    raw = logits + index.to(tl.int64) * logit_stride
    changed = adjusted + index.to(tl.int64) * adjusted_stride
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_adjusted(raw, changed, is_adjusted, ids, ids < vocab)
    if FIRST:
        mode = tl.where(row == 0, WHOLE, truncation(ints, floats, row, vocab))
        mode = tl.where((mode == TOP_P) & is_endless(top), WHOLE, mode)
        if mode != TOP_P:
            if tile == 0:
                tl.store(state + index, mode)
            return
    temperature = tl.load(floats + row * COLUMNS)
    top_p = tl.load(floats + row * COLUMNS + 1)
    slope = log2_slope(temperature)
    drawn = load_adjusted(raw, changed, is_adjusted, token, token >= 0)
    y = logarithms(x, top, slope)
    weights = fast_exp2(y)
    at = stats + (index * tiles + tile) * STATS
    if FIRST:
        tl.store(at, tl.sum(weights, axis=0))
    if MOMENTS:
        y = tl.maximum(y, FAINT)
        tl.store(at + 1, tl.sum(weights * y, axis=0))
        tl.store(at + 2, tl.sum(weights * y * y, axis=0))
    ahead = (x > drawn) | ((x == drawn) & (ids < token))
    tl.store(at + 3, tl.sum(tl.where(ahead, weights, 0.0), axis=0))
    # All stores of this program come before its own arrival; the last one sees those of all.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + index, 1, sem="acq_rel") == tiles - 1:
        tl.atomic_xchg(arrivals + index, 0, sem="relaxed")
        places = tl.arange(0, TILES_PAD)
        all_sums = stats + (index * tiles + places) * STATS
        mass = tl.load(all_sums, mask=places < tiles, other=0.0, cache_modifier=".cg")
        before = tl.load(all_sums + 3, mask=places < tiles, other=0.0, cache_modifier=".cg")
        target = share(top_p, tl.sum((mass * ONE).to(tl.int64), axis=0))
        within = tl.sum((before * ONE).to(tl.int64), axis=0) < target
        tl.store(state + index, tl.where(within & ACCEPT, WHOLE, TOP_P))
        tl.store(cutoff + index, pack(scores_of(drawn, top, temperature), token) + 1)


def weigh(
    logits: Tensor,
    rows: Tensor,
    ints: Tensor,
    floats: Tensor,
    adjusted: Tensor,
    touched: Tensor,
    best: Tensor,
    sampled: Tensor,
    stats: Tensor,
    state: Tensor,
    cutoff: Tensor,
    arrivals: Tensor,
    block: int,
    first: bool,
    last: bool,
    accept: bool,
    pdl: bool,
) -> None:
    """Weighs what ranks ahead of each row's drawn token.

    sampled: [B] int32, from `sample_plain.draw`; the inputs before as `penalties.adjust` leaves them. Writes state [B]
    int32, what is still to be done for the row (first: for every row, else only where that is TOP_P); where that is
    TOP_P, cutoff [B] int64, the least rank ahead of the token, and stats [B, T, 4] float32: for each tile the sum of
    weight and, last, of weight times y and times y squared, with y the binary logarithm of the weight, which is 1 for
    the row's best. accept: whether a token may be found good at all. arrivals: [B] int32 zeros, left so.
    """
    batch, vocab = logits.shape
    tiles = triton.cdiv(vocab, block)
    _weigh_kernel[(tiles, batch)](
        logits,
        rows,
        ints,
        floats,
        adjusted,
        touched,
        best,
        sampled,
        stats,
        state,
        cutoff,
        arrivals,
        logits.stride(0),
        adjusted.stride(0),
        vocab,
        TILES_PAD=triton.next_power_of_2(tiles),
        BLOCK=block,
        FIRST=first,
        ACCEPT=accept,
        MOMENTS=last,
        # Four programs a multiprocessor.
        maxnreg=64,
        **launch_options(pdl, warps_for(block, 16)),
    )
