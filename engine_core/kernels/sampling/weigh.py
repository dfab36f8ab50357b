"""Tokens that rank ahead of those drawn: their mass, and their number.

Top-p keeps a token if the mass ahead of it is less than p, and top-k if fewer than k tokens are ahead of it. So a drawn
token is tested in one pass, without knowing where truncation ends (see `settle`).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import at_least, fast_exp2
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, TEMPERATURE
from tandem.engine_core.kernels.sampling.draw import CANDIDATES, SETTLED
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.rank import rank_value, sortable_bits, value_of_bits
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch, num_warps_for
from tandem.engine_core.kernels.sampling.truncation import load_truncation
from tandem.engine_core.kernels.sampling.weights import load_adjusted, load_row_best, log2_slope, log_weights


@triton.jit
def _weigh_kernel(
    logits_ptr, rows_ptr, ints_ptr, floats_ptr, adjusted_ptr, touched_ptr, tile_best_ptr, candidates_ptr, ahead_ptr,
    counts_ptr, logit_stride, adjusted_stride, vocab, TILES_PAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    wait_for_previous(PDL)
    # Two rounds of loads, each of which are issued together: those by index, and those that depend on them.
    tokens_ptr = candidates_ptr + index * CANDIDATES
    settled = tl.load(tokens_ptr) == SETTLED
    row = tl.load(rows_ptr + index).to(tl.int64)
    is_adjusted = tl.load(touched_ptr + index) != 0
    largest = rank_value(tl.load(tile_best_ptr + index * tiles + tile))
    top = rank_value(load_row_best(tile_best_ptr, index, tiles, TILES_PAD))
    if settled:
        return
    top_k, top_p, _ = load_truncation(ints_ptr, floats_ptr, row, vocab)
    slope = log2_slope(tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE))
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
    lowest = tl.full([], float("inf"), tl.float32)
    for number in tl.static_range(CANDIDATES):
        lowest = tl.minimum(lowest, load_adjusted(raw, changed, is_adjusted, tl.load(tokens_ptr + number), True))
    if (top_k == 0) & (top_p >= 1.0):
        return
    offset = (index * tiles + tile) * CANDIDATES
    if largest < lowest:
        for number in tl.static_range(CANDIDATES):
            tl.store(ahead_ptr + offset + number, 0.0)
            tl.store(counts_ptr + offset + number, 0.0)
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_adjusted(raw, changed, is_adjusted, ids, ids < vocab)
    weights = fast_exp2(log_weights(x, top, slope))
    for number in tl.static_range(CANDIDATES):
        token = tl.load(tokens_ptr + number)
        drawn = load_adjusted(raw, changed, is_adjusted, token, True)
        # An equal logit is ahead if its id is lower. But for the tile of the token itself, that is so for all or none.
        # At least the next larger float is as much as larger.
        above = value_of_bits(sortable_bits(drawn) + 1)
        if token // BLOCK == tile:
            ahead = at_least(x, tl.where(ids < token, drawn, above))
        else:
            ahead = at_least(x, tl.where(token > tile * BLOCK, drawn, above))
        tl.store(ahead_ptr + offset + number, tl.sum(ahead * weights, axis=0))
        if top_k > 0:
            tl.store(counts_ptr + offset + number, tl.sum(ahead, axis=0))


def weigh(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Weigh the tokens ahead of each candidate of rows with top-k or top-p.

    Writes their weight in each tile to `ahead`, and their number to `counts` for rows with top-k.
    """
    logits, adjusted = batch.logits, scratch.adjusted
    _weigh_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        tables.ints,
        tables.floats,
        adjusted,
        scratch.touched,
        scratch.tile_best,
        scratch.candidates,
        scratch.ahead,
        scratch.counts,
        logits.stride(0),
        adjusted.stride(0),
        scratch.vocab_size,
        TILES_PAD=triton.next_power_of_2(scratch.num_tiles),
        BLOCK=scratch.tile,
        # Four programs a multiprocessor.
        maxnreg=64,
        **scratch.launch_options(num_warps_for(scratch.tile, 16)),
    )
