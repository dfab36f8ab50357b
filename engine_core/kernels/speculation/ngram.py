"""N-gram drafts (prompt lookup: Saxena, 2023): the tokens after an earlier occurrence of the last ones.

One program per row reads the token table, so no token value leaves the device. Oracle:
`kernels.speculation.reference.propose_ngrams`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.sampling.columns import TOTAL_LEN
from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.draft_tokens import (
    MAX_DRAFTS,
    MAX_QUERIES,
    PREDICTION_LEN,
    PROMPT_LEN,
    load_int,
)
from tandem.engine_core.kernels.speculation.reference import NgramRule

BLOCK, WARPS = 1024, 4
"""Positions that a program compares at a time, and its warps."""
END_BITS = tl.constexpr(28)
"""Bits of a rank below those of the match length."""
END_MASK = tl.constexpr((1 << 28) - 1)
NEAREST = tl.constexpr(1 << 26)
"""Nearness at distance 0."""
CONTEXT, PREDICTION = tl.constexpr(reference.FROM_CONTEXT), tl.constexpr(reference.FROM_PREDICTION)


@triton.jit
def _match_lengths(text_ptr, ends, inside, row_ptr, length, generated, ANCHORED: tl.constexpr, MAX: tl.constexpr):
    """Return the lengths, up to MAX, of the matches between a text before each of `ends` and the end of a row.

    inside: mask of the ends; ANCHORED: the text is aligned with the row's generated tokens, so a match that covers all
    of them counts as MAX.
    """
    is_equal = inside
    count = tl.zeros_like(ends)
    for j in tl.static_range(MAX):
        before = ends - 1 - j
        token = tl.load(text_ptr + before, mask=inside & (before >= 0), other=-2)
        last = tl.load(row_ptr + length - 1 - j, mask=length - 1 - j >= 0, other=-3)
        same = token == last
        if ANCHORED:
            same |= (ends == generated) & (j >= generated)
        is_equal &= same
        count += is_equal.to(tl.int32)
    return count


@triton.jit(do_not_specialize=["drafts"])
def _ngram_kernel(
    tokens_ptr,
    lengths_ptr,
    ints_ptr,
    predictions_ptr,
    rows_ptr,
    sources_ptr,
    token_stride,
    prediction_stride,
    max_len,
    drafts,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    SCAN: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PREDICTS: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    i = tl.arange(0, PAD)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    source = tl.full([], CONTEXT, tl.int32)
    if row > 0:
        length = tl.load(lengths_ptr + row)
        wanted = tl.minimum(load_int(ints_ptr, row, MAX_DRAFTS), load_int(ints_ptr, row, TOTAL_LEN) - 1 - length)
        row_ptr = tokens_ptr + row * token_stride
        text_ptr = predictions_ptr + row * prediction_stride
        longest = tl.zeros([], tl.int32)
        end = tl.zeros([], tl.int32)
        predicted = tl.zeros([], tl.int32)
        if PREDICTS and wanted > 0:
            predicted = load_int(ints_ptr, row, PREDICTION_LEN)
            generated = length - load_int(ints_ptr, row, PROMPT_LEN)
            best = tl.zeros([], tl.int64)
            for first in range(0, predicted, BLOCK):
                ends = first + n
                count = _match_lengths(text_ptr, ends, ends < predicted, row_ptr, length, generated, True, MAX)
                # Among equally long matches, prefer the nearest to the generated length: most of the text is repeated.
                nearness = (NEAREST - tl.abs(ends - generated)) * 2 + (ends > generated).to(tl.int32)
                rank = (count.to(tl.int64) << END_BITS) + nearness
                best = tl.maximum(best, tl.max(tl.where(count >= MIN, rank, 0), axis=0))
            if best > 0:
                source = tl.full([], PREDICTION, tl.int32)
                longest = (best >> END_BITS).to(tl.int32)
                nearest = (best & END_MASK).to(tl.int32)
                distance = NEAREST - nearest // 2
                end = generated + tl.where(nearest % 2 > 0, distance, -distance)
        least = tl.maximum(length - SCAN, 1)
        first = length - BLOCK
        while (wanted > 0) & (first + BLOCK > least) & (longest < MAX):
            ends = first + n
            count = _match_lengths(row_ptr, ends, ends >= least, row_ptr, length, 0, False, MAX)
            rank = (count.to(tl.int64) << END_BITS) + ends
            best_here = tl.max(tl.where((count >= MIN) & (count > longest), rank, 0), axis=0)
            if best_here > 0:
                source = tl.full([], CONTEXT, tl.int32)
                longest = (best_here >> END_BITS).to(tl.int32)
                end = (best_here & END_MASK).to(tl.int32)
            first -= BLOCK
        from_text = source == PREDICTION
        found = (i < wanted) & (longest > 0)
        # A match near the end of the row repeats: wrap around.
        at = tl.where(from_text, end + i, end + i % tl.maximum(length - end, 1))
        token = tl.load(row_ptr + at, mask=found & (not from_text), other=-1)
        if PREDICTS:
            token = tl.where(
                from_text, tl.load(text_ptr + at, mask=found & from_text & (at < predicted), other=-1), token
            )
        tl.store(row_ptr + length + i, token, mask=(i < drafts) & (length + i < max_len))
    tl.store(sources_ptr + index, source)


def propose_ngrams(
    tables: SamplingTables,
    predictions: Tensor,
    rows: Tensor,
    drafts: int,
    sources: Tensor,
    rule: NgramRule,
    pdl: bool = False,
) -> None:
    """Write the n-gram drafts of each row into the token table; see `kernels.speculation.reference.propose_ngrams`.

    All tensors are contiguous.
    """
    tokens = tables.tokens
    if len(rows):
        _ngram_kernel[(len(rows),)](
            *(tokens, tables.lengths, tables.ints, predictions, rows, sources),
            *(tokens.stride(0), predictions.stride(0), tokens.shape[1], drafts),
            MIN=rule.min_match,
            MAX=rule.max_match,
            SCAN=rule.max_scan,
            PAD=MAX_QUERIES,
            BLOCK=BLOCK,
            PREDICTS=predictions.shape[1] > 0,
            PDL=pdl,
            num_warps=WARPS,
            **({"launch_pdl": True} if pdl else {}),
        )
