"""Plans of decode attention: its tiles, and how many programs share a row.

What was measured on a GPU is in its tile table; the rules here are the default.
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
"""Largest number of programs that share a row's KV head."""
SHORT_SPLIT, LONG_SPLIT = 64, 1024
"""Fewest positions of a program below `MANY` pairs, and from there on, where splitting only adds combining."""
PROGRAMS_PER_SM = 2
"""Programs that fill a multiprocessor."""
FEWEST_ROWS = 16
"""Fewest rows of a tile that `tl.dot` takes."""
MANY = 256
"""Number of pairs of row and KV head from which rows alone fill the device."""
TILES = {
    32: {0: Tile(64, 4, 3), 32: Tile(32, 1, 3), MANY: Tile(64, 4, 4)},
    64: {0: Tile(64, 4, 3), 32: Tile(32, 1, 3), MANY: Tile(64, 4, 4), 512: Tile(32, 1, 3), 1024: Tile(64, 2, 2)},
    128: {0: Tile(64, 4, 3), 32: Tile(32, 2, 3), MANY: Tile(64, 4, 4), 512: Tile(64, 4, 2)},
    256: {0: Tile(32, 4, 2), 32: Tile(16, 2, 3), MANY: Tile(32, 4, 2)},
}
"""Tiles by `head_width` and by the number of pairs of row and KV head from which they are used.

With few pairs only latency counts; with many, the number of programs that fit side by side does, since the last ones
run alone. Measured in bfloat16 on an H200, in a graph; the rule where the GPU's tile table has nothing.
"""
W8A8_TILES = {
    64: {MANY: Tile(128, 4, 2), 512: Tile(128, 4, 2)},
    128: {32: Tile(32, 1, 3), MANY: Tile(128, 4, 2), 512: Tile(64, 4, 3), 1024: Tile(32, 1, 3)},
}
"""Tiles for keys and values of one byte, where they differ from `TILES`, measured likewise after `rope_and_kv_write`.

Those of 16 bits took up to 1.4 times as long.
"""
EARLY_PAIRS = {128: 512}
"""Number of pairs from which keys and values of 16 bits are loaded early, by the `head_width` for which that was
faster, measured likewise after `rope_and_kv_write`."""
FUSED_ROPE_PAIRS = {64: {64: True, 512: False, 1024: True}}
"""Number of pairs from which attention over keys and values of 16 bits rotates the heads of new tokens itself, by
`head_width`, and whether it loads early then. A forward pass of Llama-3.2-1B took an H200 1 to 3 % less so for 8 to 256
rows, but as long for one row: there the rotation before attention covers the time in which its programs start. With
heads of 128 (Llama-3.1-8B) it saved nothing from 1 to 256 rows but 0.4 % at 64."""
PDL_DELAY_MIN_WIDTH = 3072
"""Elements of a token's query, all heads together, from which the kernel after attention starts only when that has
ended. It is a product, and one of a single row loads its weights as soon as it starts: what attention waits for then
comes late. A layer of Llama-3.1-8B (4,096 elements) took an H200 111 us instead of 121 for one row, and up to 4.6 us
less for 8 to 64. Llama-3.2-1B (2,048 elements) has a quarter of those weights: 40.0 us instead of 39.3. Where it rounds
rows of INT8 instead, a step of 64 rows of the 8B took 3.93 ms instead of 3.95."""


def choose_splits(batch: int, kv_heads: int, multiprocessors: int, longest: int, at_least: int = 1) -> int:
    """Return how many programs may share a row's KV head.

    They are enough to fill the device when rows are few; for long rows among many see `extra_splits`. longest: the
    longest context possible, in positions; at_least: from `choose_plan`. Programs without work return at once, but
    cost time all the same: with one beside each that has some, 32 rows of 448 positions and 8 KV heads of 64
    elements took 15.1 us instead of 11.5 on an H200. So there are none from `MANY` pairs on.
    """
    pairs = batch * kv_heads
    fill = 1 if pairs >= MANY else ceil_div(multiprocessors * PROGRAMS_PER_SM, pairs)
    return max(1, min(max(fill, at_least), ceil_div(longest, 32), MAX_SPLITS))


def choose_tile(head_dim: int, pairs: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tile:
    """Return the tile for a number of pairs of row and KV head.

    dtype: of the queries; kv_dtype: of keys and values.
    float32 is for tests, so its tile only has to fit.
    """
    if dtype.itemsize > 2:
        return Tile(16, 4, 1)
    tiles = TILES[head_width(head_dim)]
    if kv_dtype.itemsize == 1:
        tiles = tiles | W8A8_TILES.get(head_width(head_dim), {})
    return tiles[max(least for least in tiles if pairs >= least)]


def least_positions(pairs: int) -> int:
    """Return the fewest positions that are worth a program of their own.

    pairs: number of pairs of row and KV head.
    """
    return LONG_SPLIT if pairs >= MANY else SHORT_SPLIT


def choose_plan(head_dim: int, pairs: int, dtype: torch.dtype, kv_dtype: torch.dtype, gpu: GpuTraits) -> DecodePlan:
    """Return the plan for a number of pairs of row and KV head.

    dtype: of the queries; kv_dtype: of keys and values.
    """
    width = head_width(head_dim)
    early = kv_dtype.itemsize == 2 and pairs >= EARLY_PAIRS.get(width, pairs + 1)
    plan = DecodePlan(choose_tile(head_dim, pairs, dtype, kv_dtype), least_positions(pairs), early=early)
    if dtype.itemsize <= 2:
        plan = gpu.tiles.attention(_key(width, pairs, kv_dtype), plan)
    return plan._replace(early=plan.early and gpu.pdl)


def _key(width: int, pairs: int, kv_dtype: torch.dtype) -> DecodeKey:
    return DecodeKey(width, 8 * kv_dtype.itemsize, 1 << (max(1, pairs).bit_length() - 1))


def choose_rotating(head_dim: int, pairs: int, kv_dtype: torch.dtype, gpu: GpuTraits) -> DecodePlan | None:
    """Return the plan with which attention rotates the heads of new tokens itself.

    None: a kernel before does it. kv_dtype: of keys and values, and of queries.
    """
    known = FUSED_ROPE_PAIRS.get(head_width(head_dim), {})
    least = max((least for least in known if pairs >= least), default=None)
    if least is None or kv_dtype.itemsize != 2:
        return None
    plan = choose_plan(head_dim, pairs, kv_dtype, kv_dtype, gpu)
    is_measured = _key(head_width(head_dim), pairs, kv_dtype) in gpu.tiles.decode
    return plan if is_measured else plan._replace(early=known[least] and gpu.pdl)


def fit_plan(plan: DecodePlan, query: Tensor, keys: Tensor, gpu: GpuTraits) -> DecodePlan:
    """Return a plan that fits the shared memory and the registers.

    It has no more pipeline stages than the one holds, and a warp for each `FEWEST_ROWS` query heads of a KV head: 64 of
    them in one or two warps spilled up to 8,896 bytes. Early loads are off where there are more than `FEWEST_ROWS`:
    `EARLY_REGISTERS` do not hold these. query, keys: as in `paged_decode`.
    """
    rows = tile_rows(query.shape[1] // keys.shape[1])
    stages = min(plan.tile.stages, max_stages(rows, plan.tile.positions, query, keys, gpu))
    warps = max(plan.tile.warps, rows // FEWEST_ROWS)
    return plan._replace(tile=plan.tile._replace(stages=stages, warps=warps), early=plan.early and rows == FEWEST_ROWS)


def tile_rows(group: int) -> int:
    """Return the rows of a tile.

    group: query heads of a KV head.
    """
    return max(FEWEST_ROWS, int(triton.next_power_of_2(group)))
