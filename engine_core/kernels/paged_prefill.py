"""Causal attention of rows of any lengths over the paged KV pool in Triton: prompts, chunks, decode rows beside them.

A program takes a tile of one row's neighbouring queries and one KV head, whose query heads share the tile, and goes
over the row's pages with an online softmax (FlashAttention: Dao, 2023; page tables: Kwon et al., 2023).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.paged_decode import HEAD_DIMS, LOG2_E, attend

WORDS = 4
"""int32 of one tile: its row of the page table, its first query in the step, that query's position, queries left."""


class Shape(NamedTuple):
    """Queries times heads of a program, positions it reads at once, warps, and depth of its software pipeline."""

    rows: int
    positions: int
    warps: int
    stages: int


def choose_shape(head_dim: int, dtype: torch.dtype) -> Shape:
    """float32 takes the exact product, without tensor cores: its tiles only have to fit."""
    if dtype.itemsize > 2:
        return Shape(16, 16, 4, 1)
    return Shape(64, 64 if head_dim <= 128 else 32, 4, 2)


def tile_queries(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Queries of one tile: its rows over the query heads of a KV head, rounded up to a power of two."""
    width = int(triton.next_power_of_2(heads // kv_heads))
    return max(1, choose_shape(head_dim, dtype).rows // width)


@triton.jit
def _paged_prefill_kernel(
    out,
    query,
    keys,
    values,
    tiles,
    page_table,
    query_stride,
    place_stride,
    page_stride,
    scale,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * WORDS
    head = tl.program_id(1)
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1).to(tl.int64)
    start = tl.load(tile + 2)
    queries = tl.minimum(tl.load(tile + 3), QUERIES)
    length = start + queries

    r = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK)
    # A tile of fewer queries than it has room for repeats the last one.
    index = tl.minimum(r // WIDTH, queries - 1)
    group = r % WIDTH
    real = (r // WIDTH < queries) & (group < GROUP)
    at = (first + index) * query_stride + (head * GROUP + tl.minimum(group, GROUP - 1)) * D
    q = tl.load(query + at[:, None] + d[None, :])
    position = start + index

    page_row = page_table + row * page_stride
    head_keys = keys + head * D
    head_values = values + head * D
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    # Page ids are fetched one tile ahead of their use, as in `paged_decode`.
    page = tl.load(page_row + tl.minimum(n, length - 1) // PAGE)
    for block in tl.range(0, tl.cdiv(length, BLOCK), num_stages=STAGES):
        m = block * BLOCK + n
        place = (page.to(tl.int64) * PAGE + m % PAGE)[:, None] * place_stride + d[None, :]
        k = tl.load(head_keys + place, mask=(m < length)[:, None], other=0.0)
        v = tl.load(head_values + place, mask=(m < length)[:, None], other=0.0)
        page = tl.load(page_row + tl.minimum(m + BLOCK, length - 1) // PAGE)
        visible = m[None, :] <= position[:, None]
        best, weight, acc = attend(q, k, v, visible, scale, best, weight, acc, PRECISION)
    acc = acc / weight[:, None]

    out_at = ((first + index) * KV_HEADS + head) * GROUP * D + group * D
    tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    page_table: Tensor,
    page_size: int,
    scale: float,
) -> Tensor:
    """Attention of each query over its row's positions up to its own, all of them in the pool already.

    query: [T, heads, D], heads contiguous; keys, values: [places, kv_heads, D], float32, bfloat16 or float16 as the
    query, or as in `kv_dtype`, D one of 32, 64, 128, 256; tiles: [N, 4] int32 on the device, contiguous, which together
    cover every query once: a row of the page table, the index among T of the tile's first query, that query's position,
    and how many queries the row has from there on (a tile takes up to `tile_queries` of them); page_table:
    [R, pages_per_row] int32; page_size: a power of two. Returns [T, heads, D], contiguous. ValueError for another D,
    layout or page size.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    _check(query, keys, values, tiles, page_table, page_size)
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if not len(tiles):
        return out
    shape = choose_shape(head_dim, query.dtype)
    group = heads // kv_heads
    width = triton.next_power_of_2(group)
    queries = tile_queries(heads, kv_heads, head_dim, query.dtype)
    # Tiles come first, for a grid's other dimensions end at 65,535.
    _paged_prefill_kernel[(len(tiles), kv_heads)](
        *(out, query, keys, values, tiles, page_table),
        *(query.stride(0), keys.stride(0), page_table.stride(0), scale * LOG2_E),
        GROUP=group,
        WIDTH=width,
        QUERIES=queries,
        ROWS=queries * width,
        KV_HEADS=kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK=shape.positions,
        STAGES=shape.stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        WORDS=WORDS,
        num_warps=shape.warps,
    )
    return out


def _check(query: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, page_table: Tensor, page_size: int) -> None:
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    if head_dim not in HEAD_DIMS or heads % kv_heads or page_size & (page_size - 1) or page_size < 1:
        raise ValueError(f"unsupported: head_dim {head_dim}, {heads} heads of {kv_heads}, pages of {page_size}")
    if {t.stride()[1:] for t in (query, keys, values)} != {(head_dim, 1)} or keys.stride(0) != values.stride(0):
        raise ValueError("heads of query, keys and values must be contiguous, and keys and values laid out alike")
    if page_table.stride(1) != 1 or not tiles.is_contiguous() or tiles.shape[1] != WORDS:
        raise ValueError(f"a row of the page table must be contiguous, and tiles [N, {WORDS}] too")
