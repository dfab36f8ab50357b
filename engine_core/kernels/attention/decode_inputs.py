"""Inputs of a decode step's forward pass, gathered in one launch.

They come from the device tables. `pdl`: see the head of `kernels.norm`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.paged_pool import slots_of

BLOCK = 128
"""Rows that one program gathers."""


def decode_inputs_reference(
    tokens: Tensor, page_table: PageTable, rows: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the input token and the KV slot of each decode row.

    Row i feeds the model its newest known token, tokens[rows[i], positions[i]], and writes its key and value to the
    pool's slot that the page table has for that position. Shapes and dtypes are those of `decode_inputs`, whose oracle
    this is.
    """
    row, position = rows.long(), positions.long()
    return tokens[row, position].long(), page_table.slots(row, position)


@triton.jit
def _decode_inputs_kernel(
    input_ids_ptr,
    slot_mapping_ptr,
    tokens_ptr,
    page_table_ptr,
    rows_ptr,
    positions_ptr,
    batch,
    token_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < batch
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + offs, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + offs, mask=mask, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + row * token_stride + position, mask=mask, other=0)
    page = tl.load(page_table_ptr + row * table_stride + position // PAGE_SIZE, mask=mask, other=0)
    tl.store(input_ids_ptr + offs, token.to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + offs, slots_of(page, position, PAGE_SIZE, PAGE_STRIDE), mask=mask)


def decode_inputs(
    tokens: Tensor, page_table: PageTable, rows: Tensor, positions: Tensor, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Gather the token ids and slots of a decode step; see `decode_inputs_reference`.

    tokens: [R, max_len] int32; page_table: of R rows; rows, positions: [B] integers, contiguous, rows below R,
    positions below max_len and within the rows' pages; these bounds are not checked, since the values are on the
    device. Returns (input_ids, slot_mapping), each [B] int64. Raises ValueError if the rows of a table are not
    contiguous or the page size is not a power of two.
    """
    pages = page_table.pages
    page_table.check()
    if tokens.stride(1) != 1:
        raise ValueError("each row of the token table must be contiguous")
    batch = rows.shape[0]
    input_ids = torch.empty(batch, dtype=torch.int64, device=rows.device)
    slot_mapping = torch.empty(batch, dtype=torch.int64, device=rows.device)
    if batch == 0:
        return input_ids, slot_mapping
    _decode_inputs_kernel[(triton.cdiv(batch, BLOCK),)](
        input_ids,
        slot_mapping,
        tokens,
        pages,
        rows,
        positions,
        batch,
        tokens.stride(0),
        pages.stride(0),
        BLOCK=BLOCK,
        PDL=pdl,
        **page_table.constants,
        num_warps=BLOCK // 32,
        **({"launch_pdl": True} if pdl else {}),
    )
    return input_ids, slot_mapping
