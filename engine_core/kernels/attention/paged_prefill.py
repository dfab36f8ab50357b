"""Causal attention over the paged KV pool in Triton, for rows of any lengths.

Rows may be prompts, prompt chunks and decode rows.

A program processes a tile of adjacent queries of one row and one KV head, with that head's query heads packed into the
tile, and iterates over the row's pages with an online softmax (FlashAttention: Dao, 2023; page tables: Kwon et al.,
2023). If there are too few tiles to fill the GPU, several programs split the positions of one, as in `paged_decode`.
With a sliding window a tile starts at the first block in the window of its first query.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.decode_plans import MAX_SPLITS
from tandem.engine_core.kernels.attention.online_softmax import (
    attend,
    cast_query,
    kernel_cap,
    kernel_scale,
    max_stages,
)
from tandem.engine_core.kernels.attention.paged_decode import split_scratch
from tandem.engine_core.kernels.attention.split_blocks import split_blocks
from tandem.engine_core.kernels.attention.split_counters import COUNTERS, split_counters
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.paged_pool import (
    check_band,
    check_groups,
    check_head_dim,
    check_heads,
    head_width,
    in_head,
    page_index,
    ring_row,
    slots_of,
)

TILE_WORDS = 4
"""int32 words per tile: row of the page table, index of its first query, that query's position, remaining queries.

All four are 0 in an unused tile.
"""
PROGRAMS_PER_SM = 2
"""Programs needed to fill an SM."""
MIN_SPLIT_POSITIONS = 256
"""Minimum number of positions per split."""
LOWEST = tl.constexpr(-1e30)
"""Finite lower bound of all exponents: a query may see no key of a split."""


class TileShape(NamedTuple):
    """Tile shape and launch parameters of a prefill program.

    rows: queries times heads; positions: per block; warps: per program; stages: of the software pipeline.
    """

    rows: int
    positions: int
    warps: int
    stages: int


def choose_shape(head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the measured tile shape for a head size and dtype.

    float32 uses exact matmuls without tensor cores, so its tiles only have to fit.
    """
    if dtype.itemsize > 2:
        return TileShape(16, 16, 4, 1)
    return TileShape(64, 64 if head_dim <= 128 else 32, 4, 2)


def fit_shape(shape: TileShape, query: Tensor, keys: Tensor, gpu: GpuTraits) -> TileShape:
    """Reduce the pipeline stages of a shape to what fits in shared memory.

    query, keys: as in `paged_prefill`.
    """
    rows = max(shape.rows, int(triton.next_power_of_2(query.shape[1] // keys.shape[1])))
    return shape._replace(stages=min(shape.stages, max_stages(rows, shape.positions, query, keys, gpu)))


def tile_queries(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of queries per tile.

    This is the tile's rows divided by the query heads per KV head, padded to a power of two.
    """
    width = int(triton.next_power_of_2(heads // kv_heads))
    return max(1, choose_shape(head_dim, dtype).rows // width)


def choose_splits(tiles: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the number of splits of a tile and KV head that fills the GPU.

    Programs without work return immediately.
    """
    return max(1, min(ceil_div(multiprocessors * PROGRAMS_PER_SM, tiles * kv_heads), MAX_SPLITS))


@triton.jit(do_not_specialize=["table_stride", "tokens", "splits", "least_blocks"])
def _paged_prefill_kernel(
    out_ptr,
    partial_ptr,
    log_sums_ptr,
    counters_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    tiles_ptr,
    page_table_ptr,
    scales_ptr,
    query_stride,
    slot_stride,
    table_stride,
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
    SCALED: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    number = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    tile_ptr = tiles_ptr + number * TILE_WORDS
    row = tl.load(tile_ptr).to(tl.int64)
    first = tl.load(tile_ptr + 1).to(tl.int64)
    start = tl.load(tile_ptr + 2)
    queries = tl.minimum(tl.load(tile_ptr + 3), QUERIES)
    length = start + queries
    lowest = 0
    if WINDOW is not None:
        lowest = tl.maximum(start + 1 - WINDOW, 0)
    # An unused tile has no blocks, and starts at none.
    begin, end, used = split_blocks(length, lowest, split, splits, least_blocks, BLOCK)
    if begin >= end:
        return

    r = tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    n = tl.arange(0, BLOCK)
    # A partial tile repeats its last query.
    index = tl.minimum(r // WIDTH, queries - 1)
    group = r % WIDTH
    mask = (r // WIDTH < queries) & (group < GROUP)
    q_offs = (first + index) * query_stride + (head * GROUP + tl.minimum(group, GROUP - 1)) * D
    position = start + index
    page_row = ring_row(page_table_ptr + row * table_stride, lowest, PAGE_SIZE, RING)
    head_keys = keys_ptr + head * D
    head_values = values_ptr + head * D
    # Prefetch page ids one tile ahead, as in `paged_decode`.
    page = tl.load(page_row + page_index(begin * BLOCK + n, lowest, length - 1, PAGE_SIZE, RING))
    if PDL:
        if not OVERLAP:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Bypass L1: if launched next to `paged_decode`, this program has not waited for the kernel that wrote this.
    if WIDE == D:
        q = tl.load(query_ptr + q_offs[:, None] + d[None, :], cache_modifier=".cg")
    else:
        q = tl.load(query_ptr + q_offs[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0, cache_modifier=".cg")
    q = cast_query(q, keys_ptr)
    best = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        m = block * BLOCK + n
        offs = slots_of(page, m, PAGE_SIZE, PAGE_STRIDE)[:, None] * slot_stride + d[None, :]
        inside = m < length
        if WINDOW is not None:
            inside = inside & (m >= lowest)
        k = tl.load(head_keys + offs, mask=in_head(inside, d, D, WIDE), other=0.0)
        v = tl.load(head_values + offs, mask=in_head(inside, d, D, WIDE), other=0.0)
        page = tl.load(page_row + page_index(m + BLOCK, lowest, length - 1, PAGE_SIZE, RING))
        visible = m[None, :] <= position[:, None]
        if WINDOW is not None:
            visible = visible & (m[None, :] > position[:, None] - WINDOW)
        best, weight, acc = attend(q, k, v, visible, scale, best, weight, acc, CAP, PRECISION)
    weight = tl.where(weight > 0, weight, 1.0)
    acc = acc / weight[:, None]
    if SCALED:
        acc *= tl.load(scales_ptr + 1)

    output = ((first + index) * KV_HEADS + head) * GROUP + group
    out_offs = output[:, None] * D + d[None, :]
    out_mask = in_head(mask, d, D, WIDE)
    if used == 1:
        tl.store(out_ptr + out_offs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    elif SHARED:
        outputs = tokens.to(tl.int64) * KV_HEADS * GROUP
        tl.store(log_sums_ptr + split * outputs + output, best + tl.log2(weight), mask=mask)
        tl.store(partial_ptr + split * outputs * D + out_offs, acc, mask=out_mask)
        # The barrier orders all of this program's stores before its arrival, so the last program sees all of them.
        tl.debug_barrier()
        pair = number * KV_HEADS + head
        if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counters_ptr + pair, 0)
            best = tl.full([ROWS], LOWEST, tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, WIDE], tl.float32)
            for s in range(0, used):
                # Bypass L1, which may hold stale data of an earlier launch.
                log_sum = tl.load(log_sums_ptr + s * outputs + output, mask=mask, other=LOWEST, cache_modifier=".cg")
                part = tl.load(partial_ptr + s * outputs * D + out_offs, mask=out_mask, other=0.0, cache_modifier=".cg")
                new_best = tl.maximum(best, log_sum)
                shrink, w = tl.exp2(best - new_best), tl.exp2(log_sum - new_best)
                weight = weight * shrink + w
                acc = acc * shrink[:, None] + part * w[:, None]
                best = new_best
            acc = acc / weight[:, None]
            tl.store(out_ptr + out_offs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    # A kernel that waits for this one must also have waited for the `paged_decode` that overlaps it.
    if PDL and OVERLAP:
        tl.extra.cuda.gdc_wait()


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    page_table: PageTable,
    scale: float,
    splits: int = 1,
    *,
    window: int | None = None,
    softcap: float | None = None,
    pdl: bool = False,
    overlap: bool = False,
    shape: TileShape | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend with each query to its row's positions up to and including its own.

    The keys and values of all those positions must be in the pool. query: [T, heads, D], heads contiguous; keys,
    values: [slots, kv_heads, D], float32, bfloat16 or float16 like the query, or as in `kv_dtype`, D one of
    `HEAD_DIMS`; tiles: [N, 4] int32 on the device, contiguous, together covering every query once: page table row,
    index among T of the tile's first query, that query's position, and the row's remaining number of queries (a tile
    processes up to `tile_queries` of them); scale, window, softcap: as in `LayerAttention`; splits: from
    `choose_splits`; shape: measured defaults if None; out: output tensor; scales: as in `kv_dtype`. Returns [T, heads,
    D], contiguous. Raises ValueError for an unsupported D, layout or page size, a window below 1 or a non-positive soft
    cap.

    With `pdl` the preceding kernel may write the query, keys and values, but not tiles or the page table, which are
    read before it has finished. With `overlap` the preceding kernel is `paged_decode`, which starts after every kernel
    that wrote these inputs, and both run concurrently: every row of `paged_decode` waits before it triggers its
    dependent launch. At least one tile must have work in this case. Launches on one device must be ordered;
    RuntimeError if the first is under graph capture.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    _check(query, keys, values, tiles, page_table, splits)
    check_band(window, softcap)
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if not len(tiles):
        return out
    shape = shape or choose_shape(head_dim, query.dtype)
    partial, log_sums = split_scratch(query, splits)
    counters = split_counters("paged_prefill", query.device)
    # Tiles are the first dimension because the others of a grid are limited to 65,535.
    _paged_prefill_kernel[(len(tiles), kv_heads, splits)](
        *(out, partial, log_sums, counters, query, keys, values, tiles, page_table.pages, scales),
        *(query.stride(0), keys.stride(0), page_table.pages.stride(0), kernel_scale(scale, softcap), tokens, splits),
        triton.cdiv(MIN_SPLIT_POSITIONS, shape.positions),
        KV_HEADS=kv_heads,
        SHARED=splits > 1,
        SCALED=scales is not None,
        WINDOW=window,
        CAP=kernel_cap(softcap),
        OVERLAP=overlap,
        **page_table.constants,
        **_options(shape, heads // kv_heads, head_dim, query.dtype, pdl),
    )
    return out


def _options(shape: TileShape, group: int, head_dim: int, dtype: torch.dtype, pdl: bool) -> dict[str, object]:
    width = int(triton.next_power_of_2(group))
    queries = max(1, shape.rows // width)
    return {
        "D": head_dim,
        "WIDE": head_width(head_dim),
        "GROUP": group,
        "WIDTH": width,
        "QUERIES": queries,
        "ROWS": queries * width,
        "BLOCK": shape.positions,
        "STAGES": shape.stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "TILE_WORDS": TILE_WORDS,
        "num_warps": shape.warps,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }


def _check(query: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, page_table: PageTable, splits: int) -> None:
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    check_head_dim(head_dim)
    check_groups(heads, kv_heads)
    page_table.check()
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits must be between 1 and {MAX_SPLITS}, not {splits}")
    if splits > 1 and len(tiles) * kv_heads > COUNTERS:
        raise ValueError(f"{len(tiles)} tiles of {kv_heads} KV heads exceed the {COUNTERS} counters; use one split")
    check_heads(query, keys, values)
    if not tiles.is_contiguous() or tiles.shape[1] != TILE_WORDS:
        raise ValueError(f"tiles must be contiguous, [N, {TILE_WORDS}], not {list(tiles.shape)}")
