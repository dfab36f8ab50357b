"""What a decode step's forward gathers from the device tables, in one launch.

`pdl`: see the head of `kernels.norm`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def decode_inputs_reference(
    tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """The token that each decode row feeds to the model, and the place of its key and value in the pool.

    Row i reads its newest known token, tokens[rows[i], positions[i]], and writes to offset positions[i] % page_size of
    its page pages[rows[i], positions[i] // page_size]. Shapes and dtypes as in `decode_inputs`, whose oracle this is.
    """
    row, position = rows.long(), positions.long()
    page = pages[row, position // page_size].long()
    return tokens[row, position].long(), page * page_size + position % page_size


@triton.jit
def _decode_inputs_kernel(
    input_ids,
    slot_mapping,
    tokens,
    pages,
    rows,
    positions,
    batch,
    token_stride,
    page_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < batch
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.int64)
    token = tl.load(tokens + row * token_stride + position, mask=inside, other=0)
    page = tl.load(pages + row * page_stride + position // PAGE, mask=inside, other=0)
    tl.store(input_ids + index, token.to(tl.int64), mask=inside)
    tl.store(slot_mapping + index, page.to(tl.int64) * PAGE + position % PAGE, mask=inside)


def decode_inputs(
    tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Token ids and KV places of a decode step; see `decode_inputs_reference`.

    tokens: [R, max_len] int32; pages: [R, pages_per_row] int32; rows, positions: [B] integers, contiguous, rows below
    R, positions below max_len and pages_per_row * page_size; nothing checks them, since they live on the device.
    Returns (input_ids, slot_mapping), each [B] int64. ValueError if a table's rows are scattered.
    """
    if tokens.stride(1) != 1 or pages.stride(1) != 1:
        raise ValueError("a table's rows must be contiguous")
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
        PAGE=page_size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=BLOCK // 32,
        **({"launch_pdl": True} if pdl else {}),
    )
    return input_ids, slot_mapping
