"""Argmax of every row's logits, in one Triton kernel.

Oracle: `kernels.reference.sampling.sample`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch, num_warps_for
from tandem.engine_core.kernels.sampling.sort_key import (
    best_of_tile,
    classify_tile,
    combine_tiles,
    load_logits,
    token_of,
    write_token,
)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _greedy_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    sampled_ptr,
    tokens_ptr,
    lengths_ptr,
    winner_ptr,
    arrivals_ptr,
    logit_stride,
    token_stride,
    max_len,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(1)
    tile = tl.program_id(0)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    # Issue these loads before anything waits for the row.
    x = load_logits(raw, ids, ids < vocab)
    if row == 0:
        if tile == 0:
            write_token(*(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len), *(index, row, position, 0))
        return
    best, largest = best_of_tile(x, raw, tile * BLOCK, vocab)
    best = combine_tiles(winner_ptr, arrivals_ptr, index, classify_tile(best, largest), tl.num_programs(0))
    if best != NOTHING:
        write_token(
            *(sampled_ptr, tokens_ptr, lengths_ptr, token_stride, max_len),
            *(index, row, position, token_of(best)),
        )


def sample_greedy(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Sample the argmax of each row, the lowest id on ties.

    A row with NaN or +inf, or with -inf only, yields -1. Writes the tokens to `batch.sampled` and, unless
    `batch.publish` is False, to the token table, where -1 becomes 0, and the rows' new lengths.
    """
    logits, tokens = batch.logits, tables.tokens
    _greedy_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        batch.positions,
        batch.sampled,
        tokens,
        tables.lengths,
        scratch.winner,
        scratch.arrivals,
        logits.stride(0),
        tokens.stride(0),
        batch.published_len(tokens),
        logits.shape[1],
        BLOCK=scratch.tile,
        **scratch.launch_options(num_warps_for(scratch.tile)),
    )
