"""Inputs of a captured decode step, gathered in one launch.

`pdl`: see `kernels.dependent_launch`.
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
from tandem.engine_core.kernels.sampling.columns import NUM_INTS, TOTAL_LEN
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables

BLOCK = 128
"""Tokens per program."""


def decode_inputs_reference(
    tables: SamplingTables,
    page_tables: Sequence[PageTable],
    rows: Tensor,
    positions: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the input token and the KV slots of each token of a step.

    Token i's input is the token table's entry for its row and position, and its key and value go to the slots that the
    page tables of the KV groups map this position to. A negative position means the row's newest token, and `positions`
    is updated with it. `kept` receives copies of rows and positions, row 0 for a row that has all its tokens and would
    compute its newest one. Shapes and dtypes are those of `decode_inputs`; this is its oracle.
    """
    limits = tables.ints[:, INT_COLUMNS.index("total_len")]
    is_finished = (positions < 0) & (tables.lengths >= limits)[rows.long()]
    tables.find_positions(rows, positions)
    if kept is not None:
        kept[0].copy_(torch.where(is_finished, 0, rows))
        kept[1].copy_(positions)
    row, position = rows.long(), positions.long()
    return tables.tokens[row, position].long(), torch.stack([table.slots(row, position) for table in page_tables])


@triton.jit
def _decode_inputs_kernel(
    input_ids_ptr,
    slot_mapping_ptr,
    tokens_ptr,
    lengths_ptr,
    ints_ptr,
    page_table_ptr,
    rows_ptr,
    positions_ptr,
    kept_rows_ptr,
    kept_positions_ptr,
    batch,
    token_stride,
    table_stride,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < batch
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + offs, mask=mask, other=0).to(tl.int64)
    given = tl.load(positions_ptr + offs, mask=mask, other=0)
    ours = mask & (given < 0) & (row > 0)
    newest = tl.load(lengths_ptr + row, mask=ours, other=1)
    limit = tl.load(ints_ptr + row * NUM_INTS + TOTAL_LEN, mask=ours, other=2).to(tl.int32)
    position = tl.where(given >= 0, given, tl.maximum(tl.minimum(newest, limit - 1) - 1, 0))
    tl.store(positions_ptr + offs, position, mask=mask)
    if KEEP:
        # There is nothing left to sample for a row that has all its tokens.
        tl.store(kept_rows_ptr + offs, tl.where(ours & (newest >= limit), 0, row).to(tl.int32), mask=mask)
        tl.store(kept_positions_ptr + offs, position.to(tl.int32), mask=mask)
    position = position.to(tl.int64)
    token = tl.load(tokens_ptr + row * token_stride + position, mask=mask, other=0)
    tl.store(input_ids_ptr + offs, token.to(tl.int64), mask=mask)
    for group in tl.static_range(len(COLUMNS)):
        column = position // PAGE_SIZE
        if COLUMNS[group][1]:
            column = column % COLUMNS[group][1]
        page = tl.load(page_table_ptr + row * table_stride + COLUMNS[group][0] + column, mask=mask, other=0)
        slot = slots_of(page, position, PAGE_SIZE, PAGE_STRIDE)
        tl.store(slot_mapping_ptr + group * batch + offs, slot, mask=mask)


def decode_inputs(
    tables: SamplingTables,
    page_tables: Sequence[PageTable],
    rows: Tensor,
    positions: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gather the token ids and slots of a step; see `decode_inputs_reference`.

    tables: of R rows; page_tables: one for each KV group, views of columns of one tensor of R rows; rows, positions:
    [B] int32, contiguous, rows below R, positions below max_len and within the rows' pages, or negative; bounds are not
    checked, since the values are on the device; kept: [B] int32 each, written: rows, and resolved positions, as in the
    oracle. Returns (input_ids, slot_mapping), [B] and [groups, B] int64, and replaces negative positions. Raises
    ValueError if the rows of a table are not contiguous or the page size is not a power of two.
    """
    pages, tokens = page_tables[0].pages, tables.tokens
    for table in page_tables:
        table.check()
    if tokens.stride(1) != 1:
        raise ValueError("each row of the token table must be contiguous")
    batch = rows.shape[0]
    input_ids = torch.empty(batch, dtype=torch.int64, device=rows.device)
    slot_mapping = torch.empty(len(page_tables), batch, dtype=torch.int64, device=rows.device)
    if batch == 0:
        return input_ids, slot_mapping
    _decode_inputs_kernel[(triton.cdiv(batch, BLOCK),)](
        input_ids,
        slot_mapping,
        tokens,
        tables.lengths,
        tables.ints,
        pages,
        rows,
        positions,
        *(kept or (rows, positions)),
        batch,
        tokens.stride(0),
        pages.stride(0),
        BLOCK=BLOCK,
        KEEP=kept is not None,
        PDL=pdl,
        **layout_constants(page_tables),
        num_warps=BLOCK // 32,
        **({"launch_pdl": True} if pdl else {}),
    )
    return input_ids, slot_mapping
