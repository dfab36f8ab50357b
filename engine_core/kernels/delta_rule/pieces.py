"""The rows of a step after its single tokens, found on the device.

One program reads rows and positions of all tokens, so that a captured graph needs nothing else from the host. Layouts
are those of `Pieces`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from tandem.engine_core.kernels.delta_rule.state import PIECE, Pieces, TokenRows, max_pieces
from tandem.engine_core.kernels.dependent_launch import wait_for_previous

BLOCK = 1024
"""Tokens read at once."""


@triton.jit
def _find_pieces_kernel(
    counts_ptr,
    pieces_ptr,
    spans_ptr,
    rows_ptr,
    positions_ptr,
    first,
    tokens,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    num_pieces, num_spans = 0, 0
    for start in range(first, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + token, mask=token < tokens, other=0)
        position = tl.load(positions_ptr + token, mask=token < tokens, other=0).to(tl.int32)
        has_before, has_next = (token > first) & (token < tokens), token + 1 < tokens
        row_before = tl.load(rows_ptr + token - 1, mask=has_before, other=0)
        position_before = tl.load(positions_ptr + token - 1, mask=has_before, other=0).to(tl.int32)
        row_next = tl.load(rows_ptr + token + 1, mask=has_next, other=0)
        position_next = tl.load(positions_ptr + token + 1, mask=has_next, other=0).to(tl.int32)
        is_first = (row > 0) & ((row_before != row) | (position_before + 1 != position))
        is_last = (row > 0) & ((row_next != row) | (position_next != position + 1))
        begins = is_first | ((row > 0) & (position % PIECE == 0))
        ends = is_last | ((row > 0) & (position % PIECE == PIECE - 1))
        piece = num_pieces + tl.cumsum(begins.to(tl.int32), 0) - 1
        span = num_spans + tl.cumsum(is_first.to(tl.int32), 0) - 1
        tl.store(pieces_ptr + 2 * piece, token, mask=begins)
        tl.store(pieces_ptr + 2 * piece + 1, token + 1, mask=ends)
        tl.store(spans_ptr + 2 * span, piece, mask=is_first)
        tl.store(spans_ptr + 2 * span + 1, piece + 1, mask=is_last)
        num_pieces += tl.sum(begins.to(tl.int32))
        num_spans += tl.sum(is_first.to(tl.int32))
    tl.store(counts_ptr, num_pieces)
    tl.store(counts_ptr + 1, num_spans)


def find_pieces(tokens: TokenRows, pdl: bool = False) -> Pieces | None:
    """Return the pieces of the tokens after the single ones, None if there can be none.

    Nothing is copied from the host. More than `max_spans` rows would be written outside the result's memory.
    """
    count = len(tokens.rows) - tokens.num_single
    if not count or not tokens.max_spans:
        return None
    device = tokens.rows.device
    counts = torch.empty(2, dtype=torch.int32, device=device)
    pieces = torch.empty(max_pieces(count, tokens.max_spans), 2, dtype=torch.int32, device=device)
    spans = torch.empty(tokens.max_spans, 2, dtype=torch.int32, device=device)
    _find_pieces_kernel[(1,)](
        *(counts, pieces, spans, tokens.rows, tokens.positions, tokens.num_single, len(tokens.rows)),
        PIECE=PIECE,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return Pieces(counts, pieces, spans)
