"""Launch plans of decode attention: tiles and number of splits.

The GPU's tile table has measured plans; the rules here are the default.
"""

import torch
import triton
from torch import Tensor

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.online_softmax import max_stages
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.paged_pool import head_width
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Tile
from tandem.engine_core.kernels.tiles.table import DecodeKey

MAX_SPLITS = 64
"""Maximum number of splits of a row and KV head."""
SHORT_SPLIT, LONG_SPLIT = 64, 1024
"""Minimum positions per split, below `SATURATING_PAIRS` pairs and from there on, where splitting only adds the cost of
combining."""
MEDIUM_SPLITS = {128: (32, 128)}
"""Minimum number of pairs for another number of minimum positions per split of a 16-bit KV cache, and that number, by
`head_width`. On an H200, a layer of Qwen3-30B-A3B (32 pairs) took 2.2 us less than with 64 positions, for 8 rows at a
context of 448, one of Llama-3.1-8B (64 pairs) 1.4 us less."""
PROGRAMS_PER_SM = 2
"""Programs needed to fill an SM."""
MIN_TILE_ROWS = 16
"""Minimum rows of a tile for `tl.dot`."""
SATURATING_PAIRS = 256
"""Number of (row, KV head) pairs that fill the GPU without splits."""
TILES = {
    32: {0: Tile(64, 4, 3), 32: Tile(32, 1, 3), SATURATING_PAIRS: Tile(64, 4, 4)},
    64: {
        0: Tile(64, 4, 3),
        32: Tile(32, 1, 3),
        SATURATING_PAIRS: Tile(64, 4, 4),
        512: Tile(32, 1, 3),
        1024: Tile(64, 2, 2),
    },
    128: {0: Tile(64, 4, 3), 32: Tile(32, 2, 3), SATURATING_PAIRS: Tile(64, 4, 4), 512: Tile(64, 4, 2)},
    256: {0: Tile(32, 4, 2), 32: Tile(16, 2, 3), SATURATING_PAIRS: Tile(32, 4, 2)},
}
"""Default tiles by `head_width` and minimum number of (row, KV head) pairs.

With few pairs only latency counts; with many, occupancy does, since the last programs run alone. Measured in bfloat16
on an H200, in a graph; used if the GPU's tile table has no entry.
"""
W8A8_TILES = {
    64: {SATURATING_PAIRS: Tile(128, 4, 2), 512: Tile(128, 4, 2)},
    128: {32: Tile(32, 1, 3), SATURATING_PAIRS: Tile(128, 4, 2), 512: Tile(64, 4, 3), 1024: Tile(32, 1, 3)},
}
"""Tiles for an 8-bit KV cache, where they differ from `TILES`, measured likewise after `rope_and_kv_write`.

The 16-bit tiles took up to 1.4 times as long.
"""
EARLY_PAIRS = {128: 512}
"""Minimum number of pairs for early loads of a 16-bit KV cache, by `head_width`, if they were faster; measured likewise
after `rope_and_kv_write`."""
FUSED_ROPE_PAIRS = {64: {64: True, 512: False, 1024: True}}
"""Minimum number of pairs to fuse RoPE into attention over a 16-bit KV cache, by `head_width`, and whether to use early
loads then. A forward pass of Llama-3.2-1B on an H200 took 1 to 3 % less with it for 8 to 256 rows, but the same for one
row: there the separate RoPE kernel hides the launch of attention's programs. With heads of 128 (Llama-3.1-8B) it saved
nothing from 1 to 256 rows except 0.4 % at 64."""
PDL_DELAY_MIN_WIDTH = 3072
"""Minimum number of query elements per token, over all heads, to delay the kernel after attention until attention has
ended. That kernel is a matmul, and with a single row it loads its weights as soon as it starts, which delays the loads
of attention. A layer of Llama-3.1-8B (4,096 elements) took an H200 111 us instead of 121 for one row, and up to 4.6 us
less for 8 to 64. Llama-3.2-1B (2,048 elements) has a quarter of those weights: 40.0 us instead of 39.3. With dynamic
INT8 quantization of rows instead, a step of 64 rows of the 8B took 3.93 ms instead of 3.95."""


def choose_splits(batch: int, kv_heads: int, multiprocessors: int, longest: int, at_least: int = 1) -> int:
    """Return the number of splits of a row and KV head.

    It fills the GPU if rows are few; see `extra_splits` for single long rows among many. longest: maximum context
    length, in positions; at_least: from `choose_plan`. Programs without work return immediately but are not free: with
    one idle program for each busy one, 32 rows of 448 positions and 8 KV heads of 64 elements took 15.1 us instead of
    11.5 on an H200. So there is one split from `SATURATING_PAIRS` pairs on.
    """
    pairs = batch * kv_heads
    fill = 1 if pairs >= SATURATING_PAIRS else ceil_div(multiprocessors * PROGRAMS_PER_SM, pairs)
    return max(1, min(max(fill, at_least), ceil_div(longest, 32), MAX_SPLITS))


def choose_tile(head_dim: int, pairs: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tile:
    """Return the default tile for a number of (row, KV head) pairs.

    dtype: of the queries; kv_dtype: of keys and values. float32 is for tests, so its tile only has to fit.
    """
    if dtype.itemsize > 2:
        return Tile(16, 4, 1)
    tiles = TILES[head_width(head_dim)]
    if kv_dtype.itemsize == 1:
        tiles = tiles | W8A8_TILES.get(head_width(head_dim), {})
    return tiles[max(least for least in tiles if pairs >= least)]


def min_split_positions(pairs: int) -> int:
    """Return the minimum number of positions per split.

    pairs: number of (row, KV head) pairs.
    """
    return LONG_SPLIT if pairs >= SATURATING_PAIRS else SHORT_SPLIT


def choose_plan(head_dim: int, pairs: int, dtype: torch.dtype, kv_dtype: torch.dtype, gpu: GpuTraits) -> DecodePlan:
    """Return the plan for a number of (row, KV head) pairs.

    dtype: of the queries; kv_dtype: of keys and values.
    """
    width = head_width(head_dim)
    early = kv_dtype.itemsize == 2 and pairs >= EARLY_PAIRS.get(width, pairs + 1)
    least = min_split_positions(pairs)
    if kv_dtype.itemsize == 2 and width in MEDIUM_SPLITS and MEDIUM_SPLITS[width][0] <= pairs < SATURATING_PAIRS:
        least = MEDIUM_SPLITS[width][1]
    plan = DecodePlan(choose_tile(head_dim, pairs, dtype, kv_dtype), least, early=early)
    if dtype.itemsize <= 2:
        plan = gpu.tiles.attention(_key(width, pairs, kv_dtype), plan)
    return plan._replace(early=plan.early and gpu.pdl)


def _key(width: int, pairs: int, kv_dtype: torch.dtype) -> DecodeKey:
    return DecodeKey(width, 8 * kv_dtype.itemsize, 1 << (max(1, pairs).bit_length() - 1))


def choose_fused_rope_plan(head_dim: int, pairs: int, kv_dtype: torch.dtype, gpu: GpuTraits) -> DecodePlan | None:
    """Return the plan of attention with fused RoPE, or None if a separate kernel is faster.

    kv_dtype: of keys, values and queries.
    """
    known = FUSED_ROPE_PAIRS.get(head_width(head_dim), {})
    least = max((least for least in known if pairs >= least), default=None)
    if least is None or kv_dtype.itemsize != 2:
        return None
    plan = choose_plan(head_dim, pairs, kv_dtype, kv_dtype, gpu)
    is_measured = _key(head_width(head_dim), pairs, kv_dtype) in gpu.tiles.decode
    return plan if is_measured else plan._replace(early=known[least] and gpu.pdl)


def fit_plan(plan: DecodePlan, query: Tensor, keys: Tensor, gpu: GpuTraits, queries: int = 1) -> DecodePlan:
    """Limit a plan to the available shared memory and registers.

    Pipeline stages are reduced to fit in shared memory, and there is a warp for every `MIN_TILE_ROWS` query heads of a
    KV head: 64 of them in one or two warps spilled up to 8,896 bytes. Early loads are disabled above `MIN_TILE_ROWS`
    heads, which do not fit in `EARLY_REGISTERS`. query, keys, queries: as in `paged_decode`.
    """
    rows = tile_rows(query.shape[1] // keys.shape[1] * queries)
    stages = min(plan.tile.stages, max_stages(rows, plan.tile.positions, query, keys, gpu))
    warps = max(plan.tile.warps, rows // MIN_TILE_ROWS)
    return plan._replace(
        tile=plan.tile._replace(stages=stages, warps=warps), early=plan.early and rows == MIN_TILE_ROWS
    )


def tile_rows(group: int) -> int:
    """Return the rows of a tile.

    group: query heads per KV head, of all queries of a row.
    """
    return max(MIN_TILE_ROWS, int(triton.next_power_of_2(group)))
