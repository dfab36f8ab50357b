"""Inputs and results of the passes of a draft model.

Oracles: `draft_inputs`, `write_drafts` and `note_accepted` in `kernels.speculation.reference`. `pdl`: see
`kernels.dependent_launch`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.page_table import PageTable, layout_constants
from tandem.engine_core.kernels.paged_pool import slots_of
from tandem.engine_core.kernels.sampling.columns import TOTAL_LEN
from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.draft_tokens import MAX_DRAFTS, MAX_QUERIES, load_int
from tandem.engine_core.kernels.speculation.reference import DraftState, VerifyTokens
from tandem.engine_core.kernels.speculation.verify_inputs import allocate_tokens

DRAFTS_SHIFT = tl.constexpr(reference.DRAFTS_SHIFT)


@triton.jit
def _draft_inputs_kernel(
    input_ids_ptr,
    slot_mapping_ptr,
    token_rows_ptr,
    positions_ptr,
    sample_rows_ptr,
    sample_positions_ptr,
    index_ptr,
    tokens_ptr,
    lengths_ptr,
    ints_ptr,
    draft_lengths_ptr,
    counts_ptr,
    page_table_ptr,
    rows_ptr,
    token_stride,
    table_stride,
    count,
    queries,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    IS_FIRST: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    number = tl.program_id(0)
    i = tl.arange(0, PAD)
    mask = i < queries
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + number).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    wanted = tl.minimum(load_int(ints_ptr, row, MAX_DRAFTS), load_int(ints_ptr, row, TOTAL_LEN) - 1 - length)
    if IS_FIRST:
        written = tl.zeros([], tl.int32)
        end = length - 1
        first = tl.minimum(tl.load(draft_lengths_ptr + row), end)
    else:
        written = tl.load(counts_ptr + row)
        end = length - 1 + written
        first = end
    is_wanted = (row > 0) & (written < wanted)
    newest = tl.load(tokens_ptr + row * token_stride + end, mask=is_wanted, other=-1)
    is_live = is_wanted & (newest >= 0)
    num_live = tl.where(is_live, tl.minimum(queries, end - first + 1), 0)
    is_sampled = is_live & (first + num_live > end)
    position = tl.where(is_live, first + tl.minimum(i, num_live - 1), 0)
    token = tl.load(tokens_ptr + row * token_stride + position, mask=mask, other=0)
    offs = number * queries + i
    tl.store(input_ids_ptr + offs, token.to(tl.int64), mask=mask)
    for group in tl.static_range(len(COLUMNS)):
        column = position // PAGE_SIZE
        if COLUMNS[group][1]:
            column = column % COLUMNS[group][1]
        page = tl.load(page_table_ptr + row * table_stride + COLUMNS[group][0] + column, mask=mask, other=0)
        slot = tl.where(i < num_live, slots_of(page, position.to(tl.int64), PAGE_SIZE, PAGE_STRIDE), 0)
        tl.store(slot_mapping_ptr + group * count + offs, slot, mask=mask)
    tl.store(token_rows_ptr + offs, (row + tl.zeros_like(i)).to(tl.int32), mask=mask)
    tl.store(positions_ptr + offs, position, mask=mask)
    tl.store(sample_rows_ptr + number, tl.where(is_sampled, row, 0).to(tl.int32))
    tl.store(sample_positions_ptr + number, tl.where(is_sampled, end, 0))
    tl.store(index_ptr + number, (number * queries + tl.maximum(num_live - 1, 0)).to(tl.int64))
    if IS_FIRST:
        tl.store(counts_ptr + row, 0)
        tl.store(draft_lengths_ptr + row, first + num_live, mask=is_live)


def draft_inputs(
    tables: SamplingTables,
    page_tables: Sequence[PageTable],
    state: DraftState,
    rows: Tensor,
    queries: int,
    samples: tuple[Tensor, Tensor],
    index: Tensor,
    is_first: bool,
    pdl: bool = False,
) -> VerifyTokens:
    """Gather the tokens of a pass of the draft model; see `kernels.speculation.reference.draft_inputs`.

    Bounds are not checked, since the values are on the device. Raises ValueError as `decode_inputs` does.
    """
    pages, tokens = page_tables[0].pages, tables.tokens
    found = allocate_tokens(tables, page_tables, len(rows), queries)
    if len(rows):
        _draft_inputs_kernel[(len(rows),)](
            *(*found, *samples, index, tokens, tables.lengths, tables.ints, state.lengths, state.counts, pages, rows),
            *(tokens.stride(0), pages.stride(0), len(rows) * queries, queries),
            **layout_constants(page_tables),
            IS_FIRST=is_first,
            PAD=MAX_QUERIES,
            PDL=pdl,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )
    return found


@triton.jit
def _write_drafts_kernel(
    tokens_ptr,
    lengths_ptr,
    counts_ptr,
    rows_ptr,
    sample_rows_ptr,
    sampled_ptr,
    token_stride,
    max_len,
    PDL: tl.constexpr,
):
    number = tl.program_id(0)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + number).to(tl.int64)
    written = tl.load(counts_ptr + row)
    at = tl.load(lengths_ptr + row) + written
    is_sampled = tl.load(sample_rows_ptr + number) > 0
    token = tl.where(is_sampled, tl.load(sampled_ptr + number), -1)
    tl.store(tokens_ptr + row * token_stride + at, token, mask=(row > 0) & (at < max_len))
    tl.store(counts_ptr + row, written + 1, mask=row > 0)


def write_drafts(
    tables: SamplingTables, state: DraftState, rows: Tensor, sample_rows: Tensor, sampled: Tensor, pdl: bool = False
) -> None:
    """Write one draft of each row; see `kernels.speculation.reference.write_drafts`. All tensors are contiguous."""
    tokens = tables.tokens
    if len(rows):
        _write_drafts_kernel[(len(rows),)](
            *(tokens, tables.lengths, state.counts, rows, sample_rows, sampled, tokens.stride(0), tokens.shape[1]),
            PDL=pdl,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )


@triton.jit
def _note_accepted_kernel(counts_ptr, lengths_ptr, draft_lengths_ptr, rows_ptr, PDL: tl.constexpr):
    number = tl.program_id(0)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + number).to(tl.int64)
    packed = tl.load(counts_ptr + number)
    new, drafts = packed & 0xFF, packed >> DRAFTS_SHIFT & 0xFF
    known = tl.load(lengths_ptr + row) - new + tl.minimum(new, drafts) - 1
    tl.store(draft_lengths_ptr + row, known, mask=(row > 0) & (drafts > 0))


def note_accepted(tables: SamplingTables, state: DraftState, rows: Tensor, counts: Tensor, pdl: bool = False) -> None:
    """Count the positions of accepted drafts; see `kernels.speculation.reference.note_accepted`."""
    if len(rows):
        _note_accepted_kernel[(len(rows),)](
            *(counts, tables.lengths, state.lengths, rows),
            PDL=pdl,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )
