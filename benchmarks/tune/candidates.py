"""Plans worth timing.

The kernels accept them, and they may be fast. Those of today come first.
"""

from collections.abc import Iterator
from dataclasses import replace

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import PIECE, choose, choose_gated, choose_normed, split_inputs
from tandem.engine_core.kernels.linear.quantized_plans import (
    choose_bytes,
    choose_bytes_gated,
    choose_nibbles,
    choose_nibbles_gated,
    choose_nibbles_normed,
)
from tandem.engine_core.kernels.tiles.plan_types import NIBBLE_ROWS, DecodePlan, GemvPlan, Plan, SplitKPlan, Tile
from tandem.engine_core.kernels.tiles.table import NO_TABLE, DecodeKey, ProductKey
from tandem.engine_core.kernels.tiles.table_file import decode_problem, product_problem

GROUP = 128
"""Inputs of a group of weights of four bits."""
LEAST_A_THREAD, MOST_A_THREAD = 16, {16: 128, 8: 256, 4: 512}
"""Fewest and most weights, by their bits, that a thread of a GEMV holds.

Fewer wait too often, more spill from its registers.
"""
WAVES = 3
"""Most programs that a split-K product has for each multiprocessor when its inputs are divided."""
SPLITK_TILES = ((64, 128, 4), (64, 128, 6), (64, 128, 3), (64, 64, 6), (64, 256, 3), (128, 64, 4), (128, 128, 3))
"""block_n, block_k and stages."""
DECODE_TILES = (
    *((64, 4, 4), (64, 4, 3), (64, 4, 2), (64, 2, 2), (64, 2, 3), (32, 1, 3), (32, 1, 4), (32, 2, 3), (32, 2, 4)),
    *((32, 4, 3), (128, 4, 2), (16, 1, 4)),
)


def chosen(key: ProductKey, gpu: GpuTraits) -> Plan:
    """Return the plan that the engine would take."""
    operation, bits, outputs, inputs, rows = key
    gated = operation in ("gated", "normed_gated")
    if operation in ("normed", "normed_gated"):
        if bits == 4:
            return choose_nibbles_normed(outputs, inputs, GROUP, gated, gpu)
        return choose_normed(outputs, inputs, gated, gpu, bits)
    if bits == 4:
        return (choose_nibbles_gated if gated else choose_nibbles)(rows, outputs, inputs, GROUP, gpu)
    if bits == 8:
        return (choose_bytes_gated if gated else choose_bytes)(rows, outputs, inputs, gpu)
    return (choose_gated if gated else choose)(rows, outputs, inputs, 2, gpu)


def ruled(key: ProductKey, gpu: GpuTraits) -> Plan:
    """Return the plan that the rules alone would choose."""
    return chosen(key, replace(gpu, tiles=NO_TABLE))


def product_candidates(key: ProductKey, gpu: GpuTraits) -> list[Plan]:
    """List the plans of a product.

    They are today's, the rule's, the library's and others, without repetition.
    """
    found: list[Plan] = [chosen(key, gpu), ruled(key, gpu)]
    if _has_library(key) and key.rows > 1:
        found.append(None)
    found += _gemvs(key) if key.rows == 1 else _splitks(key, gpu)
    unique = dict.fromkeys(_fitted(key, plan, gpu) for plan in found)
    return [plan for plan in unique if not product_problem(key, plan) and (plan is not None or _has_library(key))]


def most_stages(key: ProductKey, plan: SplitKPlan, gpu: GpuTraits) -> int:
    """Return how many stages of a plan fit the shared memory."""
    weight_bytes = plan.block_n * (2 if key.operation == "gated" else 1) * key.bits / 8
    stage_bytes = int((weight_bytes + max(16, key.rows) * 2) * plan.block_k)
    return gpu.max_stages(stage_bytes, warpgroup=key.bits == 16)


def _has_library(key: ProductKey) -> bool:
    return key.bits == 16 and key.operation in ("product", "gated")


def _fitted(key: ProductKey, plan: Plan, gpu: GpuTraits) -> Plan:
    if not isinstance(plan, SplitKPlan):
        return plan
    return replace(plan, stages=min(plan.stages, most_stages(key, plan, gpu)))


def _gemvs(key: ProductKey) -> Iterator[GemvPlan]:
    whole = 1 << (key.inputs - 1).bit_length()
    fused = key.operation != "product"
    wide = (1024, 2048) if key.bits == 16 else (1024, 2048, 4096)
    sizes = _whole_sizes(key, whole) if fused else tuple(size for size in wide if size < 2 * key.inputs)
    for block_k in sizes:
        for rows in _heights(key):
            for tiles in _tiles(key, block_k):
                for warps in (4, 8, 16) if fused else (4, 8):
                    columns = ceil_div(key.inputs, block_k) * block_k if fused else block_k
                    held = rows * columns // (32 * warps) * (2 if "gated" in key.operation else 1)
                    if LEAST_A_THREAD <= held <= MOST_A_THREAD[key.bits] and rows * tiles <= 16:
                        yield GemvPlan(rows, block_k, tiles, warps)


def _heights(key: ProductKey) -> tuple[int, ...]:
    if key.bits == 4:
        return (NIBBLE_ROWS // 2 if "gated" in key.operation else NIBBLE_ROWS,)
    return (2, 4, 8) if key.bits == 16 else (2, 4, 8, 16)


def _whole_sizes(key: ProductKey, whole: int) -> tuple[int, ...]:
    """List the sizes of blocks that hold rows whole.

    It is one block, or pieces too where those are shorter together.
    """
    in_pieces = key.bits == 16 and key.operation != "gated" and ceil_div(key.inputs, PIECE) * PIECE < whole
    return (whole, PIECE) if in_pieces else (whole,)


def _tiles(key: ProductKey, block_k: int) -> tuple[int, ...]:
    if (block_k < key.inputs and key.operation in ("product", "gated")) or key.bits == 4:
        return (1,)
    return (1, 2) if key.bits == 16 else (1, 2, 4)


def _splitks(key: ProductKey, gpu: GpuTraits) -> Iterator[SplitKPlan]:
    for block_n, block_k, stages in SPLITK_TILES:
        tiles = ceil_div(key.outputs, block_n)
        one_wave = split_inputs(tiles, key.inputs, gpu.multiprocessors)
        for split in dict.fromkeys((one_wave, 2 * one_wave, 1, 2, 4)):
            programs = tiles * split
            if split > one_wave and not gpu.multiprocessors // 2 <= programs <= WAVES * gpu.multiprocessors:
                continue
            if key.inputs % block_k == 0 and split * block_k <= key.inputs:
                yield SplitKPlan(block_n, block_k, split, stages, 8 if block_n == 128 and key.rows > 32 else 4)


def decode_candidates(key: DecodeKey, today: DecodePlan, rule: DecodePlan) -> list[DecodePlan]:
    """List the plans of decode attention.

    They are today's, the rule's and others, without repetition.
    """
    found = [today, rule]
    for positions, warps, stages in DECODE_TILES:
        size = positions if key.head_dim <= 128 else positions // 2
        tile = Tile(size, warps, stages)
        found.append(DecodePlan(tile, rule.least, rule.splits))
        if key.pairs >= 128:
            found += [DecodePlan(tile, 256, 2), DecodePlan(tile, 512, 4)]
    return [plan for plan in dict.fromkeys(found) if not decode_problem(key, plan)]
