"""Low-rank updates of a matmul, for tokens of any mix of adapters: LoRA (Hu et al., 2021).

Two launches for all parts of a fused projection: `shrink` multiplies the inputs by A, with the inputs split among
programs so that few tokens occupy a GPU; `expand` adds the partial sums in a fixed order, multiplies them by B and adds
the result to the matmul. The number of splits is not a constant of the kernels, so that no number of tokens waits for a
compilation. No two programs write the same element, so results are deterministic. Work follows the rank of
each adapter, not the largest: programs behind it end at once.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens

MAX_PARTS = 4
"""Parts of a fused projection."""
BLOCK_R = 16
"""Ranks of a program, the smallest inner size of a matmul on tensor cores."""
_BLOCK_K = 128
_BLOCK_N = 128
_MAX_SPLIT = 16
_PROGRAMS = 256
"""Programs of a launch that occupy a large GPU."""


@triton.jit(do_not_specialize=["SPLIT"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    order_ptr,
    blocks_ptr,
    sums_ptr,
    SPLIT,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the tokens of a block by A of their adapter.

    x: [T, K]; a: [S, PARTS, MAX_RANK, K]; ranks: [S + 1, PARTS]; order: [N, BLOCK_M]; blocks: [N]; sums: [SPLIT, N *
    BLOCK_M, PARTS * MAX_RANK] float32. Program (n, j, s) computes part s of the inputs, for block n, and ranks and part
    of the projection by j.
    """
    block = tl.program_id(0)
    part = tl.program_id(1) // RANK_BLOCKS
    first = tl.program_id(1) % RANK_BLOCKS * BLOCK_R
    split = tl.program_id(2)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype.primitive_bitwidth == 32 else "tf32"
    wait_for_previous(PDL)
    slot = tl.load(blocks_ptr + block)
    rank = tl.load(ranks_ptr + slot * PARTS + part)
    if first < rank:
        STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        rows = tl.arange(0, BLOCK_M)
        tokens = tl.load(order_ptr + block * BLOCK_M + rows)
        ranks = first + tl.arange(0, BLOCK_R)
        offs_k = tl.arange(0, BLOCK_K)
        x_rows = x_ptr + tl.maximum(tokens, 0).to(tl.int64)[:, None] * K
        a_rows = a_ptr + (((slot - 1) * PARTS + part).to(tl.int64) * MAX_RANK + ranks)[:, None] * K
        sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for step in range(split * STEPS // SPLIT, (split + 1) * STEPS // SPLIT):
            columns = (step * BLOCK_K + offs_k)[None, :]
            x = tl.load(x_rows + columns, mask=(tokens >= 0)[:, None] & (columns < K), other=0.0)
            a = tl.load(a_rows + columns, mask=(ranks < rank)[:, None] & (columns < K), other=0.0)
            sums = tl.dot(x, tl.trans(a), sums, input_precision=precision)
        WIDTH: tl.constexpr = PARTS * MAX_RANK
        row = (split * tl.num_programs(0) + block).to(tl.int64) * BLOCK_M + rows
        columns = part * MAX_RANK + ranks
        tl.store(sums_ptr + row[:, None] * WIDTH + columns[None, :], sums, mask=(ranks < rank)[None, :])


@triton.jit(do_not_specialize=["SPLIT"])
def _expand_kernel(
    sums_ptr,
    b_ptr,
    ranks_ptr,
    order_ptr,
    blocks_ptr,
    y_ptr,
    SPLIT,
    START1: tl.constexpr,
    START2: tl.constexpr,
    START3: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the results of `_shrink_kernel` by B, and add them to y.

    b: [S, MAX_RANK, OUTPUTS]; y: [T, OUTPUTS]; START1 to START3: first outputs of the parts behind the first, OUTPUTS
    for parts that there are not. Program (n, j) computes tile j of the outputs of block n; a tile is in one part.
    """
    block = tl.program_id(0)
    tile = tl.program_id(1)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype.primitive_bitwidth == 32 else "tf32"
    TILES1: tl.constexpr = (START1 + BLOCK_N - 1) // BLOCK_N
    TILES2: tl.constexpr = TILES1 + (START2 - START1 + BLOCK_N - 1) // BLOCK_N
    TILES3: tl.constexpr = TILES2 + (START3 - START2 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= TILES1).to(tl.int32) + (tile >= TILES2).to(tl.int32) + (tile >= TILES3).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, START1, tl.where(part == 2, START2, START3)))
    end = tl.where(part == 0, START1, tl.where(part == 1, START2, tl.where(part == 2, START3, OUTPUTS)))
    tile -= tl.where(part == 0, 0, tl.where(part == 1, TILES1, tl.where(part == 2, TILES2, TILES3)))
    wait_for_previous(PDL)
    slot = tl.load(blocks_ptr + block)
    rank = tl.load(ranks_ptr + slot * PARTS + part)
    if rank > 0:
        WIDTH: tl.constexpr = PARTS * MAX_RANK
        rows = tl.arange(0, BLOCK_M)
        tokens = tl.load(order_ptr + block * BLOCK_M + rows)
        columns = begin + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        update = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, rank, BLOCK_R):
            ranks = first + tl.arange(0, BLOCK_R)
            shrunk = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in range(0, SPLIT):
                row = (split * tl.num_programs(0) + block).to(tl.int64) * BLOCK_M + rows
                place = row[:, None] * WIDTH + (part * MAX_RANK + ranks)[None, :]
                shrunk += tl.load(sums_ptr + place, mask=(ranks < rank)[None, :], other=0.0)
            row = (slot - 1).to(tl.int64) * MAX_RANK + ranks
            inside = (ranks < rank)[:, None] & (columns < end)[None, :]
            b = tl.load(b_ptr + row[:, None] * OUTPUTS + columns[None, :], mask=inside, other=0.0)
            update = tl.dot(shrunk.to(dtype), b, update, input_precision=precision)
        y_place = y_ptr + tl.maximum(tokens, 0).to(tl.int64)[:, None] * OUTPUTS + columns[None, :]
        stored = (tokens >= 0)[:, None] & (columns < end)[None, :]
        y = tl.load(y_place, mask=stored, other=0.0).to(tl.float32) + update
        tl.store(y_place, y.to(dtype), mask=stored)


def add_lora(
    y: Tensor,
    x: Tensor,
    tokens: AdapterTokens,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    starts: tuple[int, ...],
    pdl: bool = False,
) -> Tensor:
    """Add x A^T B of each token's adapter to the matmul y, in place; return y.

    Arguments are as in the oracle, `kernels.reference.lora.add_lora`; all are contiguous, x, y, a and b of one dtype,
    and the tokens are in blocks.
    """
    blocks = tokens.blocks
    assert blocks is not None and y.is_contiguous() and x.is_contiguous() and a.is_contiguous() and b.is_contiguous()
    (count, size), (_, parts, max_rank, inputs) = blocks.order.shape, a.shape
    assert parts <= MAX_PARTS, f"{parts} parts of a projection, at most {MAX_PARTS}"
    rank_blocks, split = triton.cdiv(max_rank, BLOCK_R), choose_split(count * parts, inputs)
    sums = torch.empty(split, count * size, parts * max_rank, dtype=torch.float32, device=x.device)
    options = {"launch_pdl": True} if pdl else {}
    _shrink_kernel[(count, parts * rank_blocks, split)](
        x,
        a,
        ranks,
        blocks.order,
        blocks.slots,
        sums,
        split,
        K=inputs,
        PARTS=parts,
        MAX_RANK=max_rank,
        RANK_BLOCKS=rank_blocks,
        BLOCK_M=size,
        BLOCK_R=BLOCK_R,
        BLOCK_K=_BLOCK_K,
        PDL=pdl,
        **options,
    )
    inner = (*starts[1:-1], *(starts[-1:] * MAX_PARTS))[: MAX_PARTS - 1]
    tiles = sum(triton.cdiv(end - start, _BLOCK_N) for start, end in pairwise(starts))
    _expand_kernel[(count, tiles)](
        sums,
        b,
        ranks,
        blocks.order,
        blocks.slots,
        y,
        split,
        START1=inner[0],
        START2=inner[1],
        START3=inner[2],
        OUTPUTS=starts[-1],
        PARTS=parts,
        MAX_RANK=max_rank,
        BLOCK_M=size,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=BLOCK_R,
        PDL=pdl,
        **options,
    )
    return y


def choose_split(programs: int, inputs: int) -> int:
    """Choose the number of programs that share the inputs of a block, a power of 2.

    programs: without the split; each program has at least two steps of its loop.
    """
    split = 1
    while split < _MAX_SPLIT and programs * split < _PROGRAMS and 4 * split * _BLOCK_K <= inputs:
        split *= 2
    return split
