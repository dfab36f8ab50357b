"""Grouping of a step's tokens by adapter, once for all layers.

Each adapter gets blocks of its own, so that a block of a matmul reads the weights of one adapter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterBlocks, AdapterTokens

FEW_TOKENS = 256
"""Largest number of tokens with small blocks, as few of them have the same adapter."""
SMALL_BLOCK, LARGE_BLOCK = 16, 64
_TILE = 4096
"""Comparisons of slots that a program makes at once: of a chunk of tokens with all slots."""


@triton.jit(do_not_specialize=["T", "N"])
def _group_tokens_kernel(
    slots_ptr,
    order_ptr,
    blocks_ptr,
    T,
    N,
    LAST: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the blocks of one adapter, that of slot program_id + 1, of 1 to LAST.

    slots: [T]; order: [N, M]; blocks: [N]; all int32; WIDTH: power of 2 above LAST. Blocks follow in the order of their
    slots. Each program counts the tokens of all slots, and so finds its first block.
    """
    own = tl.program_id(0) + 1
    wait_for_previous(PDL)
    all_slots = tl.arange(0, WIDTH)
    counts = tl.zeros([WIDTH], tl.int32)
    for first in range(0, T, CHUNK):
        tokens = first + tl.arange(0, CHUNK)
        slots = tl.load(slots_ptr + tokens, mask=tokens < T, other=0)
        counts += tl.sum((slots[:, None] == all_slots[None, :]).to(tl.int32), axis=0)
    blocks = tl.where(all_slots > 0, (counts + M - 1) // M, 0)
    begin = tl.sum(tl.where(all_slots < own, blocks, 0))
    count = tl.sum(tl.where(all_slots == own, counts, 0))
    end = begin + (count + M - 1) // M
    found = begin * M
    for first in range(0, T, CHUNK):
        tokens = first + tl.arange(0, CHUNK)
        is_own = tl.load(slots_ptr + tokens, mask=tokens < T, other=0) == own
        index = found + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_ptr + index, tokens, mask=is_own)
        found += tl.sum(is_own.to(tl.int32))
    rest = found + tl.arange(0, M)
    tl.store(order_ptr + rest, tl.full([M], -1, tl.int32), mask=rest < end * M)
    for block in range(begin, end):
        tl.store(blocks_ptr + block, own)
    if own == LAST:
        for block in range(end, N):
            tl.store(blocks_ptr + block, 0)


def group_tokens(slots: Tensor, max_slots: int, pdl: bool = False) -> AdapterTokens:
    """Return the tokens of a step by adapter, in blocks.

    slots: [T] int32, contiguous; max_slots: the largest. Oracle: `kernels.reference.lora.group_tokens`.
    """
    tokens = len(slots)
    size = SMALL_BLOCK if tokens <= FEW_TOKENS else LARGE_BLOCK
    count, width = max_blocks(tokens, max_slots, size), triton.next_power_of_2(max_slots + 1)
    order = torch.empty(count, size, dtype=torch.int32, device=slots.device)
    blocks = torch.empty(count, dtype=torch.int32, device=slots.device)
    _group_tokens_kernel[(max_slots,)](
        slots,
        order,
        blocks,
        tokens,
        count,
        LAST=max_slots,
        WIDTH=width,
        M=size,
        CHUNK=min(256, _TILE // width),
        PDL=pdl,
        **({"launch_pdl": True} if pdl else {}),
    )
    return AdapterTokens(slots, AdapterBlocks(order, blocks))


def max_blocks(tokens: int, max_slots: int, size: int) -> int:
    """Return the largest number of blocks that tokens of any adapters take."""
    return tokens // size + min(tokens, max_slots)
