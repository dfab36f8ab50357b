"""Apply a step's updates to the per-row tables, in one launch."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import UPDATE_FIELDS, SamplingTables

BLOCK, PROGRAMS = 256, 32
"""Words per program and iteration, and number of programs."""


def update_tables_reference(locations: Tensor, inputs: Tensor, pages: Tensor, tables: SamplingTables) -> None:
    """Apply updates like `update_tables`; this is its oracle."""
    fields = [inputs[offset : offset + length] for offset, length in locations.tolist()]
    for table, index, values in zip((tables.tokens, tables.lengths, pages), fields[:6:2], fields[1:6:2], strict=True):
        table.view(-1)[index.view(torch.int64)] = values
    rows = fields[6].view(torch.int64)[:: tables.ints.shape[1]]
    for table, values in zip((tables.ints, tables.floats, tables.suppressed), fields[6:], strict=True):
        table[rows] = values.view(table.dtype).view(-1, table.shape[1])


@triton.jit
def _scatter(locations_ptr, inputs_ptr, table_ptr, FIELD: tl.constexpr, BLOCK: tl.constexpr):
    """Scatter the values of field FIELD + 1 to the 64-bit indices in field FIELD."""
    indices_ptr = inputs_ptr + tl.load(locations_ptr + 2 * FIELD)
    count = tl.load(locations_ptr + 2 * FIELD + 1) // 2
    values_ptr = inputs_ptr + tl.load(locations_ptr + 2 * FIELD + 2)
    first = tl.program_id(0) * BLOCK
    while first < count:
        offs = first + tl.arange(0, BLOCK)
        mask = offs < count
        low = tl.load(indices_ptr + 2 * offs, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(indices_ptr + 2 * offs + 1, mask=mask, other=0).to(tl.int64)
        tl.store(table_ptr + ((high << 32) | low), tl.load(values_ptr + offs, mask=mask), mask=mask)
        first += tl.num_programs(0) * BLOCK


@triton.jit
def _write_rows(
    locations_ptr,
    inputs_ptr,
    rows_ptr,
    table_ptr,
    FIELD: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write consecutive rows of WIDTH words of a field to the rows of a table.

    rows_ptr: row indices, STEP words apart.
    """
    values_ptr = inputs_ptr + tl.load(locations_ptr + 2 * FIELD)
    count = tl.load(locations_ptr + 2 * FIELD + 1)
    first = tl.program_id(0) * BLOCK
    while first < count:
        offs = first + tl.arange(0, BLOCK)
        mask = offs < count
        row = tl.load(rows_ptr + offs // WIDTH * STEP, mask=mask, other=0)
        tl.store(table_ptr + row * WIDTH + offs % WIDTH, tl.load(values_ptr + offs, mask=mask), mask=mask)
        first += tl.num_programs(0) * BLOCK


@triton.jit
def _update_tables_kernel(
    locations_ptr,
    inputs_ptr,
    tokens_ptr,
    lengths_ptr,
    pages_ptr,
    ints_ptr,
    floats_ptr,
    suppressed_ptr,
    INT_WORDS: tl.constexpr,
    FLOATS: tl.constexpr,
    SUPPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _scatter(locations_ptr, inputs_ptr, tokens_ptr, 0, BLOCK)
    _scatter(locations_ptr, inputs_ptr, lengths_ptr, 2, BLOCK)
    _scatter(locations_ptr, inputs_ptr, pages_ptr, 4, BLOCK)
    # The first integer column is the 64-bit row index.
    rows_ptr = inputs_ptr + tl.load(locations_ptr + 2 * 6)
    _write_rows(locations_ptr, inputs_ptr, rows_ptr, ints_ptr, 6, INT_WORDS, INT_WORDS, BLOCK)
    _write_rows(locations_ptr, inputs_ptr, rows_ptr, floats_ptr, 7, FLOATS, INT_WORDS, BLOCK)
    _write_rows(locations_ptr, inputs_ptr, rows_ptr, suppressed_ptr, 8, SUPPRESSED, INT_WORDS, BLOCK)


def update_tables(locations: Tensor, inputs: Tensor, pages: Tensor, tables: SamplingTables) -> None:
    """Apply the updates of a packed step, except biases, to the tables.

    Reads nothing from the host, so it can be captured in a graph. locations: [len(UPDATE_FIELDS), 2] int32, offset in
    `inputs` and length, in words, of each of these fields; zeros for a missing one. inputs: int32, contiguous; pages:
    [rows, columns] int32. Indices and rows are not checked. Raises ValueError for a non-contiguous table.
    """
    written = tables.tokens, tables.lengths, pages, tables.ints, tables.floats, tables.suppressed
    if not all(table.is_contiguous() for table in (*written, locations, inputs)):
        raise ValueError("update_tables needs contiguous tables, locations and inputs")
    assert locations.shape == (len(UPDATE_FIELDS), 2), f"locations of shape {tuple(locations.shape)}"
    words = [table.view(torch.int32) for table in written]
    _update_tables_kernel[(PROGRAMS,)](
        locations,
        inputs,
        *words,
        INT_WORDS=words[3].shape[1],
        FLOATS=words[4].shape[1],
        SUPPRESSED=words[5].shape[1],
        BLOCK=BLOCK,
        num_warps=BLOCK // 32,
    )
