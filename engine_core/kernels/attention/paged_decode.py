"""Decode attention over the paged KV pool in Triton: one query a row, lengths and pages read on the device.

Flash decoding (Dao et al., 2023) over a page table (Kwon et al., 2023). The grid is fixed, (KV heads, splits, rows),
and a program finds on the device how long its row is and which share of it is its own; one captured graph thus serves
every mix of lengths, and a step needs no planning. The query heads of a KV head form one tile of `tl.dot`. Of a row
that several programs share, the last to finish combines what all have stored.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.split_counters import COUNTERS, arrivals

HEAD_DIMS = (32, 64, 128, 256)
MAX_SPLITS = 64
SHORT_SPLIT, LONG_SPLIT = 64, 1024
"""Positions that a program takes at least: up to `MANY` rows, and from there, where splitting only adds combining."""
BALANCE = 16384
"""Positions of the longest possible row that call for one more split, so that a long row cannot hold up a batch."""
PROGRAMS_PER_SM = 2


class Tile(NamedTuple):
    """Positions a program reads at once, its warps, and the depth of its software pipeline."""

    positions: int
    warps: int
    stages: int


MANY = 256
"""Rows times KV heads from which rows alone fill the device."""
TILES = {
    32: {0: Tile(64, 4, 3), 32: Tile(32, 1, 3), MANY: Tile(64, 4, 4)},
    64: {0: Tile(64, 4, 3), 32: Tile(32, 1, 3), MANY: Tile(64, 4, 4), 512: Tile(32, 1, 3), 1024: Tile(64, 2, 2)},
    128: {0: Tile(64, 4, 3), 32: Tile(32, 2, 3), MANY: Tile(64, 4, 4), 512: Tile(64, 4, 2)},
    256: {0: Tile(32, 4, 2), 32: Tile(16, 2, 3), MANY: Tile(32, 4, 2)},
}
"""By head_dim, from so many rows times KV heads on: at first latency is all that counts, in the end how many programs
fit side by side, since the last ones run alone. Measured in bfloat16 on an H200, in a graph."""


def choose_splits(batch: int, kv_heads: int, multiprocessors: int, longest: int) -> int:
    """How many programs may share a row's KV head: enough to fill the device with few rows, and, with many, enough
    that one long row does not take all the others' time.

    longest: the longest context possible, in tokens. Programs without work leave at once.
    """
    fill = ceil_div(multiprocessors * PROGRAMS_PER_SM, batch * kv_heads)
    return max(1, min(max(fill, ceil_div(longest, BALANCE)), ceil_div(longest, 32), MAX_SPLITS))


def choose_tile(head_dim: int, pairs: int, dtype: torch.dtype) -> Tile:
    """The tile for so many rows times KV heads. float32 is for tests: its tile only has to fit."""
    if dtype.itemsize > 2:
        return Tile(16, 4, 1)
    return next(tile for least, tile in reversed(TILES[head_dim].items()) if pairs >= least)


LOG2_E = 1.4426950408889634


@triton.jit
def attend(q, k, v, visible, scale, best, weight, acc, PRECISION: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein, 2018), in powers of two. Keys and values of a narrower
    dtype than the query's are widened, which is exact. visible: bool, broadcast to [queries, keys]."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    p = tl.exp2(scores - new_best[:, None])
    weight = weight * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_best, weight, acc


@triton.jit
def _combine(partial, logs, used, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    """Weighs the outputs of `used` splits by their softmax sums. Returns [ROWS, D] float32."""
    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, used, CHUNK):
        s = start + tl.arange(0, CHUNK)
        real = (s < used)[:, None] & (g < GROUP)[None, :]
        at = s[:, None] * GROUP + g[None, :]
        # Past the first-level cache, which may hold what an earlier launch left there.
        log = tl.load(logs + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            partial + at[:, :, None] * D + d[None, None, :], mask=real[:, :, None], other=0.0, cache_modifier=".cg"
        )
        # Unused heads of the tile have no weight at all; a finite floor keeps them from giving NaN.
        new_best = tl.maximum(tl.maximum(best, tl.max(log, axis=0)), -1e30)
        shrink = tl.exp2(best - new_best)
        w = tl.exp2(log - new_best[None, :])
        weight = weight * shrink + tl.sum(w, axis=0)
        acc = acc * shrink[:, None] + tl.sum(out * w[:, :, None], axis=0)
        best = new_best
    return acc / tl.where(g < GROUP, weight, 1.0)[:, None]


@triton.jit(do_not_specialize=["page_stride", "splits", "least_blocks"])
def _paged_decode_kernel(
    out,
    partial,
    logs,
    counters,
    query,
    keys,
    values,
    rows,
    positions,
    page_table,
    query_stride,
    place_stride,
    page_stride,
    scale,
    splits,
    least_blocks,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    position = tl.load(positions + b).to(tl.int32)
    row = tl.load(rows + b).to(tl.int64)
    length = position + 1
    blocks = tl.cdiv(length, BLOCK)
    share = tl.maximum(tl.cdiv(blocks, splits), least_blocks)
    first = split * share
    last = tl.minimum(first + share, blocks)
    if first >= blocks:
        return
    used = tl.cdiv(blocks, share)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK)
    page_row = page_table + row * page_stride
    head_keys = keys + head * D
    head_values = values + head * D

    # Page ids are fetched one tile ahead of their use: otherwise each tile's loads would wait for its page ids', and
    # only one tile would be on its way at a time.
    end = tl.minimum(last * BLOCK, length) - 1
    page = tl.load(page_row + tl.minimum(first * BLOCK + n, end) // PAGE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_at = b.to(tl.int64) * query_stride + (head * GROUP + g[:, None]) * D + d[None, :]
    q = tl.load(query + q_at, mask=(g < GROUP)[:, None], other=0.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        m = block * BLOCK + n
        at = (page.to(tl.int64) * PAGE + m % PAGE)[:, None] * place_stride + d[None, :]
        k = tl.load(head_keys + at, mask=(m < length)[:, None], other=0.0)
        v = tl.load(head_values + at, mask=(m < length)[:, None], other=0.0)
        page = tl.load(page_row + tl.minimum(m + BLOCK, end) // PAGE)
        best, weight, acc = attend(q, k, v, (m < length)[None, :], scale, best, weight, acc, PRECISION)
    acc = acc / weight[:, None]

    out_group = out + (b.to(tl.int64) * KV_HEADS + head) * GROUP * D
    if used == 1:
        tl.store(out_group + g[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=(g < GROUP)[:, None])
    elif SHARED:
        pair = b.to(tl.int64) * KV_HEADS + head
        group_logs = logs + pair * splits * GROUP
        group_partial = partial + pair * splits * GROUP * D
        tl.store(group_logs + split * GROUP + g, best + tl.log2(weight), mask=g < GROUP)
        tl.store(group_partial + (split * GROUP + g[:, None]) * D + d[None, :], acc, mask=(g < GROUP)[:, None])
        # All of this program's stores come before its own arrival; the last one sees those of all.
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counters + pair, 0)
            total = _combine(group_partial, group_logs, used, GROUP, COMBINE_ROWS, D, CHUNK)
            h = tl.arange(0, COMBINE_ROWS)
            tl.store(out_group + h[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=(h < GROUP)[:, None])


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    page_size: int,
    scale: float,
    splits: int,
    *,
    pdl: bool = False,
    tile: Tile | None = None,
    least: int | None = None,
    out: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one new token a row over its row's positions 0 to `positions` inclusive, already in the pool.

    query: [B, heads, D], heads contiguous; keys, values: [places, kv_heads, D], float32, bfloat16 or float16 as the
    query, or as in `kv_dtype`, D one of 32, 64, 128, 256; rows, positions: [B] integers on the device, contiguous;
    page_table: [R, pages_per_row] int32, whose row r holds the pages of r in order; page_size: a power of two; splits:
    from `choose_splits`; tile, least (positions worth a program of their own): measured defaults if None; out: where
    to write; scratch: from `split_scratch`, for who has to hold it. Returns [B, heads, D], contiguous.

    With `pdl` the kernel right before may write the query, keys and values, but not rows, positions or the page table,
    which are read before it has finished. Launches on one device must be ordered, as they share counters; the first
    must not be under graph capture, RuntimeError. ValueError for another D, layout or page size.
    """
    batch, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    _check(query, keys, values, page_table, page_size, splits)
    if out is None:
        out = torch.empty((batch, heads, head_dim), dtype=query.dtype, device=query.device)
    if batch == 0:
        return out
    pairs = batch * kv_heads
    tile = tile or choose_tile(head_dim, pairs, query.dtype)
    least = least or (LONG_SPLIT if pairs >= MANY else SHORT_SPLIT)
    partial, logs = scratch or split_scratch(query, splits)
    _paged_decode_kernel[(kv_heads, splits, batch)](
        *(out, partial, logs, arrivals("paged_decode", query.device), query, keys, values, rows, positions, page_table),
        *(query.stride(0), keys.stride(0), page_table.stride(0), scale * LOG2_E, splits),
        triton.cdiv(least, tile.positions),
        KV_HEADS=kv_heads,
        SHARED=splits > 1,
        PAGE=page_size,
        **_options(tile, heads // kv_heads, head_dim, query.dtype, pdl),
    )
    return out


def split_scratch(query: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Two of float32 a split and head: what its positions give, and the logarithm of their softmax sum."""
    heads = query.shape[0] * query.shape[1] * splits if splits > 1 else 0
    partial = torch.empty(heads * query.shape[2], dtype=torch.float32, device=query.device)
    return partial, torch.empty(heads, dtype=torch.float32, device=query.device)


def _options(tile: Tile, group: int, head_dim: int, dtype: torch.dtype, pdl: bool) -> dict[str, object]:
    combine_rows = triton.next_power_of_2(group)
    return {
        "D": head_dim,
        "GROUP": group,
        "ROWS": max(16, combine_rows),
        "BLOCK": tile.positions,
        "STAGES": tile.stages,
        "COMBINE_ROWS": combine_rows,
        "CHUNK": max(1, min(32, 1024 * tile.warps // (combine_rows * head_dim))),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }


def _check(query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, page_size: int, splits: int) -> None:
    batch, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    if head_dim not in HEAD_DIMS or heads % kv_heads or page_size & (page_size - 1) or page_size < 1:
        raise ValueError(f"unsupported: head_dim {head_dim}, {heads} heads of {kv_heads}, pages of {page_size}")
    if not 1 <= splits <= MAX_SPLITS or batch * kv_heads > COUNTERS:
        raise ValueError(f"at most {MAX_SPLITS} splits and {COUNTERS} rows times KV heads")
    if {t.stride()[1:] for t in (query, keys, values)} != {(head_dim, 1)} or keys.stride(0) != values.stride(0):
        raise ValueError("heads of query, keys and values must be contiguous, and keys and values laid out alike")
    if page_table.stride(1) != 1:
        raise ValueError("a row of the page table must be contiguous")
