"""Decode attention over the paged KV pool in Triton, with one query per row or a few adjacent ones.

Lengths and pages are read on the device.

Flash decoding (Dao et al., 2023) over a page table (Kwon et al., 2023). The grid is fixed, (KV heads, splits, rows),
and a program computes its share of the row from the row's length on the device. So one captured graph serves every mix
of lengths, and a step needs no planning. Rows much longer than the others get extra splits. The query heads of a KV
head form one tile of `tl.dot`, those of all queries of a row, which share one read of the keys and values. If several
programs split a row, the last to finish combines their partial results. With a sliding window only the blocks in the
window are split, so the cost of a row is bounded by its window.

Early loads: the preceding kernel, `rope_and_kv_write`, writes only the newest position of each row's keys and values;
all other positions were written by earlier steps. So a program may load its first blocks before that kernel has
finished, unless they contain the newest position, of several queries the first of their positions. If RoPE is fused
(`newest_token`), which takes a single query, no program reads the newest position from the pool. This is valid because
a row's new positions are those of its queries, and no row reads a page that another row of the same step fills (a page
enters the prefix cache only after the step that fills it was launched).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.attention.attended_heads import check_quantized, store_heads
from tandem.engine_core.kernels.attention.decode_plans import MAX_SPLITS, choose_tile, min_split_positions, tile_rows
from tandem.engine_core.kernels.attention.extra_splits import ExtraSplits
from tandem.engine_core.kernels.attention.newest_token import begin, load_newest
from tandem.engine_core.kernels.attention.online_softmax import (
    attend,
    cast_query,
    kernel_cap,
    kernel_scale,
)
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.attention.split_blocks import combine_splits, split_blocks
from tandem.engine_core.kernels.attention.split_counters import COUNTERS, split_counters
from tandem.engine_core.kernels.dependent_launch import wait_for_previous
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
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import Tile

CHUNK, SHORT_CHUNK = 1024, 512
"""Elements per warp that the last program of a row combines at a time. The second, used if most programs combine
nothing, keeps their register count at that of programs that never combine, so more run concurrently."""
WIDE_GROUP = 8
"""Query heads per KV head from which CHUNK is twice as large, so that as many splits are combined at a time as with
four. A layer of Qwen3-30B-A3B (groups of 8) took an H200 51.2 us instead of 53.9 for one row at a context of 448."""
MAX_QUERIES = 8
"""Maximum queries of a row."""
LOWEST = tl.constexpr(-1e30)
"""Finite lower bound of the exponents of several queries: the earlier ones may see no key of a split."""
EARLY_REGISTERS = 128
"""Maximum registers per thread with early loads. Without this limit the compiler uses more for heads of 128 elements,
and fewer programs run concurrently."""


@triton.jit(do_not_specialize=["table_stride", "splits", "least_blocks", "out_stride"])
def _paged_decode_kernel(
    out_ptr,
    partial_ptr,
    log_sums_ptr,
    counters_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    rows_ptr,
    positions_ptr,
    page_table_ptr,
    scales_ptr,
    extra_splits_ptr,
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_stride,
    sin_stride,
    eps,
    out_scales_ptr,
    out_stride,
    query_stride,
    slot_stride,
    table_stride,
    scale,
    splits,
    least_blocks,
    queries,
    GROUP: tl.constexpr,
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
    COMBINE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXTRA: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    DELAY_NEXT: tl.constexpr,
    QUERIES: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    programs = splits
    if EXTRA:
        # Extra splits come first in the grid, since they belong to the longest rows. A row's own splits do not wait for
        # the loads of the assignment.
        batch = tl.num_programs(2) - EXTRA
        if b < EXTRA:
            extra = b * splits + split
            b = tl.load(extra_splits_ptr + 2 * batch + extra)
            split = splits + extra - tl.load(extra_splits_ptr + tl.maximum(b, 0))
        else:
            b -= EXTRA
        if b < 0:
            return
        first_extra = tl.load(extra_splits_ptr + b)
        programs += tl.load(extra_splits_ptr + batch + b)
    position = tl.load(positions_ptr + b * queries).to(tl.int32)
    row = tl.load(rows_ptr + b * queries).to(tl.int64)
    length = position + 1
    lowest = 0
    if WINDOW is not None:
        lowest = tl.maximum(length - WINDOW, 0)
    if QUERIES > 1:
        length = tl.load(positions_ptr + b * queries + queries - 1).to(tl.int32) + 1
    first, last, used = split_blocks(length, lowest, split, programs, least_blocks, BLOCK)
    if first >= last:
        return

    g = tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    n = tl.arange(0, BLOCK)
    page_row = ring_row(page_table_ptr + row * table_stride, lowest, PAGE_SIZE, RING)
    head_keys = keys_ptr + head * D
    head_values = values_ptr + head * D

    # Prefetch page ids one tile ahead: otherwise each tile's loads would wait for its page ids, and only one tile would
    # be in flight at a time.
    end = tl.minimum(last * BLOCK, length) - 1
    page = tl.load(page_row + page_index(first * BLOCK + n, lowest, end, PAGE_SIZE, RING))
    query_row = query_ptr + (b * queries).to(tl.int64) * query_stride
    if QUERIES > 1:
        # Heads of the tile that are not used take the last query's.
        number = tl.minimum(g // GROUP, queries - 1)
        query_position = tl.load(positions_ptr + b * queries + number).to(tl.int32)
    in_group = in_head(g < GROUP * queries, d, D, WIDE)
    in_pool, owner, newest = length, last * BLOCK > position, None
    if ROTARY_PAIRS:
        # The split with the newest position keeps its key and value in registers; the pool provides the earlier ones.
        in_pool = position
        newest = load_newest(
            *(cos_ptr, sin_ptr, slot_mapping_ptr, q_norm_ptr, k_norm_ptr, scales_ptr, b, cos_stride, sin_stride),
            *(D, WIDE, ROTARY_PAIRS, NORM, SCALED),
        )
    if SCALED:
        value_scale = tl.load(scales_ptr + 1)

    best = tl.full([ROWS], float("-inf") if QUERIES == 1 else LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    q = cast_query(tl.zeros([ROWS, WIDE], query_ptr.dtype.element_ty), keys_ptr)
    # The pipeline's prologue, fewer than `STAGES` blocks, is loaded before the loop and so before the wait in it.
    if not EARLY or (not ROTARY_PAIRS and tl.minimum(first + STAGES, last) * BLOCK > position):
        wait_for_previous(PDL, DELAY_NEXT)
    if not EARLY:
        q, best, weight, acc = begin(
            *(query_row, query_stride, keys_ptr, values_ptr, slot_stride, head, in_group, scale, owner, newest),
            *(eps, best, weight, acc, GROUP, KV_HEADS, D, CAP, NORM, SCALED, QUERIES),
        )
    for block in tl.range(first, last, num_stages=STAGES):
        if EARLY and block == first:
            wait_for_previous(PDL, DELAY_NEXT)
            q, best, weight, acc = begin(
                *(query_row, query_stride, keys_ptr, values_ptr, slot_stride, head, in_group, scale, owner, newest),
                *(eps, best, weight, acc, GROUP, KV_HEADS, D, CAP, NORM, SCALED, QUERIES),
            )
        m = block * BLOCK + n
        offs = slots_of(page, m, PAGE_SIZE, PAGE_STRIDE)[:, None] * slot_stride + d[None, :]
        visible = m < in_pool
        if WINDOW is not None:
            visible = visible & (m >= lowest)
        k = tl.load(head_keys + offs, mask=in_head(visible, d, D, WIDE), other=0.0)
        v = tl.load(head_values + offs, mask=in_head(visible, d, D, WIDE), other=0.0)
        page = tl.load(page_row + page_index(m + BLOCK, lowest, end, PAGE_SIZE, RING))
        seen = visible[None, :]
        if QUERIES > 1:
            seen = m[None, :] <= query_position[:, None]
            if WINDOW is not None:
                seen = seen & (m[None, :] > query_position[:, None] - WINDOW)
        best, weight, acc = attend(q, k, v, seen, scale, best, weight, acc, CAP, PRECISION)
    if QUERIES > 1:
        # A split may begin after a query; a NaN stays.
        weight = tl.where(weight == 0.0, 1.0, weight)
    acc = acc / weight[:, None]
    if SCALED:
        acc *= value_scale

    if used == 1:
        store_heads(
            *(out_ptr, out_scales_ptr, b * queries, head, acc, g, d, out_stride, queries),
            *(GROUP, KV_HEADS, D, WIDE, QUANT, query_ptr.dtype.element_ty, QUERIES),
        )
    elif SHARED:
        pair = b.to(tl.int64) * KV_HEADS + head
        tile_heads: tl.constexpr = GROUP * QUERIES
        group_log_sums = log_sums_ptr + pair * splits * tile_heads
        group_partial = partial_ptr + pair * splits * tile_heads * D
        index, beyond = split, 0
        if EXTRA:
            # The partial results of all rows' own splits are followed by those of the extra splits, head by head.
            own = (b * KV_HEADS + head + 1) * splits
            beyond = (batch * KV_HEADS + head * EXTRA) * splits + first_extra - own
            index = tl.where(split < splits, split, split + beyond)
        tl.store(group_log_sums + index * tile_heads + g, best + tl.log2(weight), mask=g < tile_heads)
        tl.store(group_partial + (index * tile_heads + g[:, None]) * D + d[None, :], acc, mask=in_group)
        # The barrier orders all of this program's stores before its arrival, so the last program sees all of them.
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counters_ptr + pair, 0)
            total = combine_splits(
                *(group_partial, group_log_sums, used, splits, beyond, GROUP * queries),
                *(EXTRA, tile_heads, COMBINE_ROWS, D, WIDE, CHUNK),
            )
            store_heads(
                *(
                    out_ptr,
                    out_scales_ptr,
                    b * queries,
                    head,
                    total,
                    tl.arange(0, COMBINE_ROWS),
                    d,
                    out_stride,
                    queries,
                ),
                *(GROUP, KV_HEADS, D, WIDE, QUANT, query_ptr.dtype.element_ty, QUERIES),
            )


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: PageTable,
    scale: float,
    splits: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    pdl: bool = False,
    tile: Tile | None = None,
    least: int | None = None,
    out: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
    scales: Tensor | None = None,
    extra_splits: ExtraSplits | None = None,
    early: bool = False,
    delay_next: bool = False,
    rotation: Rotation | None = None,
    quantized: QuantizedActivation | None = None,
    amax: Tensor | None = None,
    queries: int = 1,
) -> Tensor:
    """Attend with the new tokens of each row to the row's positions up to and including their own.

    Each row has `queries` adjacent tokens, at most MAX_QUERIES, so B tokens are B / queries rows; a row's positions do
    not descend, and their values must be finite (see `rope_and_kv_write`): a query multiplies later values by 0.
    Token i attends to positions 0 to positions[i] of its row, all in the pool unless RoPE is fused, which takes one
    query a row. query: [B, heads, D], heads contiguous; keys, values: [slots, kv_heads, D], float32, bfloat16 or
    float16 like the query, or as in `kv_dtype`, D one of `HEAD_DIMS`; rows, positions: [B] integers on the device,
    contiguous; scale, window, softcap: as in `LayerAttention`; splits: from `choose_splits`; tile, least, early: of a
    `DecodePlan`, the rule's tile and least if None; out: output tensor; scratch: from `split_scratch`, for callers that
    must keep it alive; scales: as in `kv_dtype`; extra_splits: for these positions and splits; delay_next: the next
    kernel starts only when this one has ended; rotation: fuse RoPE and the KV write: query is the output of the QKV
    projection, [B, heads + 2 * kv_heads, D]; quantized: output tensor with a static scale or one per head; amax: output
    of the heads' absolute maxima, [B, heads] float32. Returns [B, heads, D], contiguous, or the values of `quantized`.

    With `pdl` the preceding kernel may write the query, keys and values (with `early` only the newest, with a rotation
    none), but nothing else. Launches on one device must be ordered, as they share counters. Raises RuntimeError if the
    first is under graph capture, ValueError for an unsupported D, layout, page size, rotation or window.
    """
    (batch, heads, head_dim), kv_heads = query.shape, keys.shape[1]
    heads -= 2 * kv_heads if rotation is not None else 0
    _check(query, heads, keys, values, page_table, splits, rotation, window, softcap)
    _check_queries(batch, queries, rotation)
    out = _result(query, heads, quantized, amax, out)
    if batch == 0:
        return out
    row_count = batch // queries
    tile = tile or choose_tile(head_dim, row_count * kv_heads, query.dtype, keys.dtype)
    count = extra_splits.count if extra_splits is not None else 0
    _paged_decode_kernel[(kv_heads, splits, row_count + count // splits)](
        *(out, *(scratch or split_scratch(query[:, :heads], splits, count, queries))),
        *(split_counters("paged_decode", query.device), query, keys, values, rows, positions, page_table.pages, scales),
        *(
            extra_splits.plan if extra_splits is not None else positions,
            *_optional(rotation, quantized, amax, positions),
        ),
        *(query.stride(0), keys.stride(0), page_table.pages.stride(0), kernel_scale(scale, softcap), splits),
        *(triton.cdiv(least or min_split_positions(row_count * kv_heads), tile.positions), queries),
        **(page_table.constants | {"KV_HEADS": kv_heads}),
        **_variant(window, softcap, scales, rotation, delay_next, quantized, amax),
        **_options(tile, heads // kv_heads, queries, head_dim, query.dtype, pdl, early, splits, count),
    )
    return out


def _result(
    query: Tensor, heads: int, quantized: QuantizedActivation | None, amax: Tensor | None, out: Tensor | None
) -> Tensor:
    """Check the optional outputs, and return the output tensor."""
    check_quantized(len(query), heads, quantized, amax)
    if out is not None:
        return out
    if quantized is not None:
        return quantized.values.view(-1, heads, query.shape[2])
    return torch.empty((len(query), heads, query.shape[2]), dtype=query.dtype, device=query.device)


def _optional(
    rotation: Rotation | None, quantized: QuantizedActivation | None, amax: Tensor | None, unused: Tensor
) -> tuple[Tensor | int | float, ...]:
    """Return the kernel's arguments of RoPE and of output quantization.

    unused: passed for tensors that are not given.
    """
    of_bytes = (unused if amax is None else amax, 0)
    if quantized is not None:
        of_bytes = quantized.scales, quantized.values.shape[0]
    if rotation is None:
        return (*(unused,) * 5, 0, 0, 0.0, *of_bytes)
    tensors = (unused if tensor is None else tensor for tensor in rotation[:5])
    return (*tensors, rotation.cos.stride(0), rotation.sin.stride(0), rotation.eps, *of_bytes)


def _variant(
    window: int | None,
    softcap: float | None,
    scales: Tensor | None,
    rotation: Rotation | None,
    delay_next: bool,
    quantized: QuantizedActivation | None,
    amax: Tensor | None,
) -> dict[str, int | float | None]:
    return {
        "WINDOW": window,
        "CAP": kernel_cap(softcap),
        "SCALED": scales is not None,
        "ROTARY_PAIRS": 0 if rotation is None else rotation.cos.shape[2] // 2,
        "NORM": rotation is not None and rotation.q_norm is not None,
        "DELAY_NEXT": delay_next,
        "QUANT": quantized.scales.ndim if quantized is not None else 3 if amax is not None else 0,
    }


def split_scratch(query: Tensor, splits: int, extra_splits: int = 0, queries: int = 1) -> tuple[Tensor, Tensor]:
    """Allocate the partial results of split rows.

    The last program of a row combines them. extra: number of extra splits of a KV head; queries: tokens of a row; the
    results have room for `padded_queries`.

    Returns the outputs and the base-2 log-sum-exps, both float32, [(B * splits + extra) * heads * D] and [(B * splits +
    extra) * heads] for B rows; empty for a single split without extra ones.
    """
    rows = query.shape[0] // queries * splits + extra_splits if splits > 1 or extra_splits else 0
    count = rows * padded_queries(queries) * query.shape[1]
    partial = torch.empty(count * query.shape[2], dtype=torch.float32, device=query.device)
    return partial, torch.empty(count, dtype=torch.float32, device=query.device)


def _options(
    tile: Tile,
    group: int,
    queries: int,
    head_dim: int,
    dtype: torch.dtype,
    pdl: bool,
    early: bool,
    splits: int,
    extra_splits: int,
) -> dict[str, object]:
    queries = padded_queries(queries)
    heads = group * queries
    combine_rows = triton.next_power_of_2(heads)
    wide = queries == 1 and combine_rows >= WIDE_GROUP
    chunk = SHORT_CHUNK if extra_splits else CHUNK * (2 if wide else 1)
    together = max(1, min(32, chunk * tile.warps // (combine_rows * head_width(head_dim))))
    return {
        "SHARED": splits > 1 or extra_splits > 0,
        "EXTRA": extra_splits // splits,
        "D": head_dim,
        "WIDE": head_width(head_dim),
        "GROUP": group,
        "ROWS": tile_rows(heads),
        "QUERIES": queries,
        "BLOCK": tile.positions,
        "STAGES": tile.stages,
        "COMBINE_ROWS": combine_rows,
        # The heads of several queries fill the registers, so one split at a time, the next one being loaded.
        "CHUNK": together if queries == 1 else 1,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "PDL": pdl,
        "EARLY": early,
        **({"maxnreg": EARLY_REGISTERS} if early else {}),
        **({"launch_pdl": True} if pdl else {}),
    }


def padded_queries(queries: int) -> int:
    """Return the number of queries that a tile has room for: 1, 4 or 8.

    With each number compiled for itself, the start of a server that verifies up to 7 drafts would take twice as long.
    """
    return 1 if queries == 1 else max(4, triton.next_power_of_2(queries))


def _check_queries(tokens: int, queries: int, rotation: Rotation | None) -> None:
    if not 1 <= queries <= MAX_QUERIES or tokens % queries:
        raise ValueError(f"{tokens} tokens are not rows of {queries} queries, of at most {MAX_QUERIES}")
    if queries > 1 and rotation is not None:
        raise ValueError(f"RoPE cannot be fused into attention with {queries} queries a row")


def _check(
    query: Tensor,
    heads: int,
    keys: Tensor,
    values: Tensor,
    page_table: PageTable,
    splits: int,
    rotation: Rotation | None,
    window: int | None,
    softcap: float | None,
) -> None:
    (batch, _, head_dim), kv_heads = query.shape, keys.shape[1]
    if rotation is not None:
        rotation.check(head_dim)
    check_head_dim(head_dim)
    check_groups(heads, kv_heads)
    page_table.check()
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits must be between 1 and {MAX_SPLITS}, not {splits}")
    check_band(window, softcap)
    if batch * kv_heads > COUNTERS:
        raise ValueError(f"{batch} rows of {kv_heads} KV heads exceed the {COUNTERS} counters; decode fewer rows")
    check_heads(query, keys, values)
