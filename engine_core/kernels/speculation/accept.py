"""Acceptance of drafts: the longest prefix that equals the sampled tokens, and the token sampled after it.

Oracle: `kernels.speculation.reference.accept`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.draft_tokens import MAX_QUERIES, load_drafts

DRAFTS_SHIFT = tl.constexpr(reference.DRAFTS_SHIFT)
SOURCE_SHIFT = tl.constexpr(reference.SOURCE_SHIFT)


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def _accept_kernel(
    sampled_ptr,
    counts_ptr,
    sources_ptr,
    rows_ptr,
    tokens_ptr,
    lengths_ptr,
    ints_ptr,
    token_stride,
    max_len,
    queries,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    i = tl.arange(0, PAD)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    sampled = tl.load(sampled_ptr + index * queries + i, mask=i < queries, other=-1)
    source = tl.load(sources_ptr + index)
    length = tl.load(lengths_ptr + row)
    drafts, proposed, limit = load_drafts(tokens_ptr, ints_ptr, row, length, token_stride, max_len, i, queries)
    matches = (i < proposed) & (sampled == drafts)
    accepted = tl.min(tl.where(matches, queries, i), axis=0)
    count = tl.maximum(tl.minimum(accepted + 1, limit - length), 0)
    packed = count | (proposed << DRAFTS_SHIFT) | (source << SOURCE_SHIFT)
    tl.store(counts_ptr + index, tl.where(row > 0, packed, 0))
    taken = (i < count) & (row > 0)
    # One warp has loaded all drafts by now, since `count` depends on all of them.
    tl.store(tokens_ptr + row * token_stride + length + i, tl.maximum(sampled, 0), mask=taken)
    tl.store(lengths_ptr + row, length + count, mask=row > 0)


def accept(
    tables: SamplingTables,
    rows: Tensor,
    queries: int,
    sampled: Tensor,
    sources: Tensor,
    counts: Tensor,
    pdl: bool = False,
) -> None:
    """Append the accepted tokens to each row; see `kernels.speculation.reference.accept`.

    All tensors are contiguous.
    """
    tokens = tables.tokens
    if len(rows):
        _accept_kernel[(len(rows),)](
            *(sampled, counts, sources, rows, tokens, tables.lengths, tables.ints, tokens.stride(0), tokens.shape[1]),
            queries,
            PAD=MAX_QUERIES,
            PDL=pdl,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )
