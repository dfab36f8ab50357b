"""Causal attention of rows of any lengths over the paged KV pool in Triton: prompts, chunks, decode rows beside them.

A program takes a tile of one row's neighbouring queries and one KV head, whose query heads share the tile, and goes
over the row's pages with an online softmax (FlashAttention: Dao, 2023; page tables: Kwon et al., 2023). Where tiles are
too few to fill the device, several programs share one's positions, as in `paged_decode`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.paged_decode import HEAD_DIMS, LOG2_E, MAX_SPLITS, attend
from tandem.engine_core.kernels.attention.split_counters import COUNTERS, arrivals

WORDS = 4
"""int32 of one tile: its row of the page table, its first query in the step, that query's position, queries left; of a
tile without work all 0."""
PROGRAMS_PER_SM = 2
LEAST = 256
"""Positions that are worth a program of their own."""
LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: of a program's share a query may see nothing."""


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


def choose_splits(tiles: int, kv_heads: int, multiprocessors: int) -> int:
    """How many programs may share a tile of one KV head: enough for the device. Who finds no work leaves at once."""
    return max(1, min(ceil_div(multiprocessors * PROGRAMS_PER_SM, tiles * kv_heads), MAX_SPLITS))


@triton.jit(do_not_specialize=["page_stride", "tokens", "splits", "least_blocks"])
def _paged_prefill_kernel(
    out,
    partial,
    logs,
    counters,
    query,
    keys,
    values,
    tiles,
    page_table,
    query_stride,
    place_stride,
    page_stride,
    scale,
    tokens,
    splits,
    least_blocks,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
    BESIDE: tl.constexpr,
):
    number = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    tile = tiles + number * WORDS
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1).to(tl.int64)
    start = tl.load(tile + 2)
    queries = tl.minimum(tl.load(tile + 3), QUERIES)
    length = start + queries
    blocks = tl.cdiv(length, BLOCK)
    share = tl.maximum(tl.cdiv(blocks, splits), least_blocks)
    begin = split * share
    end = tl.minimum(begin + share, blocks)
    if begin >= blocks:
        return
    used = tl.cdiv(blocks, share)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK)
    # A tile of fewer queries than it has room for repeats the last one.
    index = tl.minimum(r // WIDTH, queries - 1)
    group = r % WIDTH
    real = (r // WIDTH < queries) & (group < GROUP)
    at = (first + index) * query_stride + (head * GROUP + tl.minimum(group, GROUP - 1)) * D
    position = start + index
    page_row = page_table + row * page_stride
    head_keys = keys + head * D
    head_values = values + head * D
    # Page ids are fetched one tile ahead of their use, as in `paged_decode`.
    page = tl.load(page_row + tl.minimum(begin * BLOCK + n, length - 1) // PAGE)
    if PDL:
        if not BESIDE:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Past the first-level cache: a program beside `paged_decode` has waited for nothing since this was written.
    q = tl.load(query + at[:, None] + d[None, :], cache_modifier=".cg")
    best = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        m = block * BLOCK + n
        place = (page.to(tl.int64) * PAGE + m % PAGE)[:, None] * place_stride + d[None, :]
        k = tl.load(head_keys + place, mask=(m < length)[:, None], other=0.0)
        v = tl.load(head_values + place, mask=(m < length)[:, None], other=0.0)
        page = tl.load(page_row + tl.minimum(m + BLOCK, length - 1) // PAGE)
        visible = m[None, :] <= position[:, None]
        best, weight, acc = attend(q, k, v, visible, scale, best, weight, acc, PRECISION)
    weight = tl.where(weight > 0, weight, 1.0)
    acc = acc / weight[:, None]

    line = ((first + index) * KV_HEADS + head) * GROUP + group
    out_at = line[:, None] * D + d[None, :]
    if used == 1:
        tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=real[:, None])
    elif SHARED:
        lines = tokens.to(tl.int64) * KV_HEADS * GROUP
        tl.store(logs + split * lines + line, best + tl.log2(weight), mask=real)
        tl.store(partial + split * lines * D + out_at, acc, mask=real[:, None])
        # All of this program's stores come before its own arrival; the last one sees those of all.
        tl.debug_barrier()
        pair = number * KV_HEADS + head
        if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counters + pair, 0)
            best = tl.full([ROWS], LOWEST, tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, D], tl.float32)
            for s in range(0, used):
                # Past the first-level cache, which may hold what an earlier launch left there.
                log = tl.load(logs + s * lines + line, mask=real, other=LOWEST, cache_modifier=".cg")
                part = tl.load(partial + s * lines * D + out_at, mask=real[:, None], other=0.0, cache_modifier=".cg")
                new_best = tl.maximum(best, log)
                shrink, w = tl.exp2(best - new_best), tl.exp2(log - new_best)
                weight = weight * shrink + w
                acc = acc * shrink[:, None] + part * w[:, None]
                best = new_best
            acc = acc / weight[:, None]
            tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=real[:, None])
    # So that whoever waits for this kernel has waited for the one beside it, too.
    if PDL and BESIDE:
        tl.extra.cuda.gdc_wait()


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    page_table: Tensor,
    page_size: int,
    scale: float,
    splits: int = 1,
    *,
    pdl: bool = False,
    beside: bool = False,
    shape: Shape | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each query over its row's positions up to its own, all of them in the pool already.

    query: [T, heads, D], heads contiguous; keys, values: [places, kv_heads, D], float32, bfloat16 or float16 as the
    query, or as in `kv_dtype`, D one of 32, 64, 128, 256; tiles: [N, 4] int32 on the device, contiguous, which together
    cover every query once: a row of the page table, the index among T of the tile's first query, that query's position,
    and how many queries the row has from there on (a tile takes up to `tile_queries` of them); page_table:
    [R, pages_per_row] int32; page_size: a power of two; splits: from `choose_splits`; shape: measured defaults if None;
    out: where to write. Returns [T, heads, D], contiguous. ValueError for another D, layout or page size.

    With `pdl` the kernel right before may write the query, keys and values, but not tiles or the page table, which are
    read before it has finished. With `beside` it is one that begins after all that wrote those, and the two run side by
    side: `paged_decode`, whose every row waits before it lets a successor start; at least one tile has work then.
    Launches on one device must be ordered, and the first not under graph capture, RuntimeError.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    _check(query, keys, values, tiles, page_table, page_size, splits)
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if not len(tiles):
        return out
    shape = shape or choose_shape(head_dim, query.dtype)
    # Of each split: what its positions give, and the logarithm of their softmax sum.
    lines = tokens * heads * splits if splits > 1 else 0
    partial = torch.empty(lines * head_dim, dtype=torch.float32, device=query.device)
    logs = torch.empty(lines, dtype=torch.float32, device=query.device)
    # Tiles come first, for a grid's other dimensions end at 65,535.
    _paged_prefill_kernel[(len(tiles), kv_heads, splits)](
        *(out, partial, logs, arrivals("paged_prefill", query.device), query, keys, values, tiles, page_table),
        *(query.stride(0), keys.stride(0), page_table.stride(0), scale * LOG2_E, tokens, splits),
        triton.cdiv(LEAST, shape.positions),
        KV_HEADS=kv_heads,
        SHARED=splits > 1,
        PAGE=page_size,
        BESIDE=beside,
        **_options(shape, heads // kv_heads, head_dim, query.dtype, pdl),
    )
    return out


def _options(shape: Shape, group: int, head_dim: int, dtype: torch.dtype, pdl: bool) -> dict[str, object]:
    width = int(triton.next_power_of_2(group))
    queries = max(1, shape.rows // width)
    return {
        "D": head_dim,
        "GROUP": group,
        "WIDTH": width,
        "QUERIES": queries,
        "ROWS": queries * width,
        "BLOCK": shape.positions,
        "STAGES": shape.stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "WORDS": WORDS,
        "num_warps": shape.warps,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }


def _check(
    query: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, page_table: Tensor, page_size: int, splits: int
) -> None:
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    if head_dim not in HEAD_DIMS or heads % kv_heads or page_size & (page_size - 1) or page_size < 1:
        raise ValueError(f"unsupported: head_dim {head_dim}, {heads} heads of {kv_heads}, pages of {page_size}")
    if not 1 <= splits <= MAX_SPLITS or (splits > 1 and len(tiles) * kv_heads > COUNTERS):
        raise ValueError(f"at most {MAX_SPLITS} splits, and with more than one {COUNTERS} tiles times KV heads")
    if {t.stride()[1:] for t in (query, keys, values)} != {(head_dim, 1)} or keys.stride(0) != values.stride(0):
        raise ValueError("heads of query, keys and values must be contiguous, and keys and values laid out alike")
    if page_table.stride(1) != 1 or not tiles.is_contiguous() or tiles.shape[1] != WORDS:
        raise ValueError(f"a row of the page table must be contiguous, and tiles [N, {WORDS}] too")
