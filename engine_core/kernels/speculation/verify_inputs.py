"""Inputs of a captured step that verifies drafts, gathered in one launch.

Oracle: `kernels.speculation.reference.verify_inputs`. `pdl`: see `kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.page_table import PageTable, layout_constants
from tandem.engine_core.kernels.paged_pool import slots_of
from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation.draft_tokens import MAX_QUERIES, load_drafts
from tandem.engine_core.kernels.speculation.reference import VerifyTokens


@triton.jit(do_not_specialize=["count"])
def _verify_inputs_kernel(
    input_ids_ptr,
    slot_mapping_ptr,
    token_rows_ptr,
    positions_ptr,
    sample_rows_ptr,
    sample_positions_ptr,
    tokens_ptr,
    lengths_ptr,
    ints_ptr,
    page_table_ptr,
    rows_ptr,
    token_stride,
    table_stride,
    max_len,
    count,
    queries,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    i = tl.arange(0, PAD)
    mask = i < queries
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    _, drafts, limit = load_drafts(tokens_ptr, ints_ptr, row, length, token_stride, max_len, i, queries)
    drafts = tl.where(row > 0, drafts, 0)
    newest = tl.where(row > 0, tl.maximum(tl.minimum(length, limit - 1) - 1, 0), 0)
    position = newest + tl.minimum(i, drafts)
    is_live = i <= drafts
    is_sampled = is_live & (row > 0) & (length < limit)
    token = tl.load(tokens_ptr + row * token_stride + position, mask=mask, other=0)
    offs = index * queries + i
    tl.store(input_ids_ptr + offs, token.to(tl.int64), mask=mask)
    for group in tl.static_range(len(COLUMNS)):
        column = position // PAGE_SIZE
        if COLUMNS[group][1]:
            column = column % COLUMNS[group][1]
        page = tl.load(page_table_ptr + row * table_stride + COLUMNS[group][0] + column, mask=mask, other=0)
        slot = tl.where(is_live, slots_of(page, position.to(tl.int64), PAGE_SIZE, PAGE_STRIDE), 0)
        tl.store(slot_mapping_ptr + group * count + offs, slot, mask=mask)
    tl.store(token_rows_ptr + offs, (row + tl.zeros_like(i)).to(tl.int32), mask=mask)
    tl.store(positions_ptr + offs, position, mask=mask)
    tl.store(sample_rows_ptr + offs, tl.where(is_sampled, row, 0).to(tl.int32), mask=mask)
    tl.store(sample_positions_ptr + offs, tl.where(is_sampled, position, 0), mask=mask)


def verify_inputs(
    tables: SamplingTables,
    page_tables: Sequence[PageTable],
    rows: Tensor,
    queries: int,
    samples: tuple[Tensor, Tensor],
    pdl: bool = False,
) -> VerifyTokens:
    """Gather the tokens of a step that verifies drafts; see `kernels.speculation.reference.verify_inputs`.

    Bounds are not checked, since the values are on the device. Raises ValueError as `decode_inputs` does.
    """
    pages, tokens = page_tables[0].pages, tables.tokens
    found = allocate_tokens(tables, page_tables, len(rows), queries)
    if len(rows):
        _verify_inputs_kernel[(len(rows),)](
            *(*found, *samples, tokens, tables.lengths, tables.ints, pages, rows),
            *(tokens.stride(0), pages.stride(0), tokens.shape[1], len(rows) * queries, queries),
            **layout_constants(page_tables),
            PAD=MAX_QUERIES,
            PDL=pdl,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )
    return found


def allocate_tokens(
    tables: SamplingTables, page_tables: Sequence[PageTable], num_rows: int, queries: int
) -> VerifyTokens:
    """Allocate the tokens of a step of `num_rows` rows with `queries` tokens each.

    Raises ValueError if a kernel cannot read the tables.
    """
    for table in page_tables:
        table.check()
    if tables.tokens.stride(1) != 1:
        raise ValueError("each row of the token table must be contiguous")
    count, device = num_rows * queries, tables.tokens.device
    ids = torch.empty(count, dtype=torch.int64, device=device)
    slots = torch.empty(len(page_tables), count, dtype=torch.int64, device=device)
    token_rows, positions = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    return VerifyTokens(ids, slots, token_rows, positions)
