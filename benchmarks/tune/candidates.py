"""List candidate plans of matmuls and decode attention, the rule's first."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import CHUNK, MAX_SPLIT, choose, choose_gated, choose_normed, split_inputs
from tandem.engine_core.kernels.linear.quantized_plans import (
    MIN_SPLIT_INPUTS,
    choose_eight_bit,
    choose_eight_bit_gated,
    choose_int4,
    choose_int4_gated,
    choose_int4_normed,
)
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, GemvPlan, Plan, SplitKPlan, Tile
from tandem.engine_core.kernels.tiles.table import FEW_ROWS, NO_TABLE, DecodeKey, MatmulKey, TileTable
from tandem.engine_core.kernels.tiles.table_file import decode_problem, matmul_problem

GROUP = 128
"""Group size of 4-bit weights."""
MIN_PER_THREAD, MAX_PER_THREAD = {16: 16, 8: 64, 4: 128}, {16: 128, 8: 256, 4: 512}
"""Minimum and maximum weights per thread of a GEMV tile, by bits.

Fewer stall on loads, more spill registers.
"""
WARPS, WIDE_WARPS = (1, 2, 4, 8), (2, 4, 8, 16)
"""Warps of programs that may loop over the inputs, and of programs that hold more than one step."""
PROGRAMS = 4
"""Maximum programs per multiprocessor of a split-K matmul: the number that runs concurrently with 128 threads of 128
registers."""
SPLITK_TILES = (
    *((64, 128, 4, 4), (64, 128, 6, 4), (64, 128, 3, 4), (64, 64, 6, 4), (64, 256, 3, 4), (128, 64, 4, 8)),
    *((128, 128, 3, 8), (128, 64, 4, 4)),
)
"""block_n, block_k, stages and warps."""
INT4_TILES = (
    *((64, 128, 4, 4), (64, 128, 6, 4), (64, 128, 3, 4), (64, 64, 6, 4), (64, 128, 4, 8), (128, 128, 4, 4)),
    *((128, 128, 4, 8), (128, 128, 3, 8), (32, 128, 6, 4), (32, 128, 4, 2)),
)
"""The same for 4-bit weights."""
DECODE_TILES = (
    *((64, 4, 4), (64, 4, 3), (64, 4, 2), (64, 2, 2), (64, 2, 3), (32, 1, 3), (32, 1, 4), (32, 2, 3), (32, 2, 4)),
    *((32, 4, 3), (128, 4, 2), (16, 1, 4)),
)
EARLY_TILES = {(128, 16): {(64, 4), (32, 2), (32, 4)}, (128, 8): {(32, 4)}}
"""Positions and warps of tiles that do not spill with early loads within `EARLY_REGISTERS` on sm_90, by head width and
KV bits. Heads of up to 64 elements never spill. Programs that share a row spill up to 16 bytes per thread."""


def chosen(key: MatmulKey, gpu: GpuTraits) -> Plan:
    """Return the plan that the engine chooses."""
    operation, bits, outputs, inputs, rows = key
    gated = operation in ("gated", "normed_gated")
    if operation in ("normed", "normed_gated"):
        if bits == 4:
            return choose_int4_normed(outputs, inputs, GROUP, gated, gpu)
        return choose_normed(outputs, inputs, gated, gpu, bits, rows=rows)
    if bits == 4:
        return (choose_int4_gated if gated else choose_int4)(rows, outputs, inputs, GROUP, gpu)
    if bits == 8:
        return (choose_eight_bit_gated if gated else choose_eight_bit)(rows, outputs, inputs, gpu)
    return (choose_gated if gated else choose)(rows, outputs, inputs, 2, gpu)


def ruled(key: MatmulKey, gpu: GpuTraits) -> Plan:
    """Return the plan that the rules choose without a table."""
    return chosen(key, replace(gpu, tiles=NO_TABLE))


def matmul_candidates(key: MatmulKey, gpu: GpuTraits) -> list[Plan]:
    """List the distinct plans of a matmul: the rule's, the library, others and the current one.

    Empty if no kernel supports the matmul.
    """
    rule = ruled(key, gpu)
    if key.rows == FEW_ROWS:
        return list(dict.fromkeys([rule, *_few_rows_gemvs(key), chosen(key, gpu)]))
    if rule is None and not _has_library(key):
        return []
    found: list[Plan] = [rule]
    if _has_library(key) and key.rows > 1:
        found.append(None)
    found += _gemvs(key, gpu) if key.rows == 1 else _splitks(key, gpu)
    found = [rule, *(_fitted(key, plan, gpu) for plan in found if not matmul_problem(key, plan)), chosen(key, gpu)]
    return [plan for plan in dict.fromkeys(found) if plan is not None or _has_library(key)]


def _has_library(key: MatmulKey) -> bool:
    return key.bits == 16 and key.operation in ("product", "gated")


def _fitted(key: MatmulKey, plan: Plan, gpu: GpuTraits) -> Plan:
    """Return a plan with the number of stages that the engine would use."""
    return chosen(key, replace(gpu, tiles=TileTable(gpu.name, {key: plan})))


def _gemvs(key: MatmulKey, gpu: GpuTraits) -> Iterator[GemvPlan]:
    """Yield plans for one row."""
    whole = 1 << (key.inputs - 1).bit_length()
    in_steps = key.operation == "product"
    steps = {16: (1024, 2048), 8: (1024, 2048, 4096), 4: (512, 1024, 2048, 4096)}[key.bits]
    sizes = tuple(size for size in steps if size < 2 * key.inputs) if in_steps else _whole_sizes(key, whole)
    if key.bits < 16 and whole not in sizes:
        sizes += (whole,)
    for block_k in sizes:
        for rows in _heights(key):
            for tiles in _tiles(key, block_k, rows, gpu):
                for warps in WARPS if in_steps and block_k <= steps[-1] else WIDE_WARPS:
                    columns = block_k if in_steps else ceil_div(key.inputs, block_k) * block_k
                    held = rows * columns // (32 * warps) * (2 if "gated" in key.operation else 1)
                    if MIN_PER_THREAD[key.bits] <= held <= MAX_PER_THREAD[key.bits]:
                        yield GemvPlan(rows, block_k, tiles, warps)


def _few_rows_gemvs(key: MatmulKey) -> Iterator[GemvPlan]:
    """Yield the plans of `FEW_ROWS` rows that spill few registers."""
    if key.operation == "product":
        for rows, block_k, warps in product((2, 4, 8), (512, 1024, 2048), (2, 4, 8)):
            if block_k < 2 * key.inputs and 16 <= rows * block_k // (32 * warps) <= 64:
                yield GemvPlan(rows, block_k, 1, warps)
        return
    whole = 1 << (key.inputs - 1).bit_length()
    for rows, tiles, warps in product((1, 2, 4), (1, 2, 4, 8), (2, 4, 8, 16)):
        held = whole // (32 * warps)
        if held <= 32 and 8 <= rows * held * (2 if key.operation == "normed_gated" else 1) <= 64:
            yield GemvPlan(rows, whole, tiles, warps)


def _heights(key: MatmulKey) -> tuple[int, ...]:
    return (2, 4, 8, 16) if key.bits == 4 else (2, 4, 8)


def _whole_sizes(key: MatmulKey, whole: int) -> tuple[int, ...]:
    """List the block sizes that cover a weight row.

    One block, and also several blocks where these are shorter together.
    """
    in_chunks = key.bits == 16 and key.operation != "gated" and ceil_div(key.inputs, CHUNK) * CHUNK < whole
    return (whole, CHUNK) if in_chunks else (whole,)


def _tiles(key: MatmulKey, block_k: int, rows: int, gpu: GpuTraits) -> tuple[int, ...]:
    """List the numbers of tiles per program.

    For quantized weights: two to six programs per multiprocessor, the number that runs concurrently, or few tiles.
    """
    if block_k < key.inputs and key.operation in ("product", "gated"):
        return (1,)
    if key.bits == 16:
        return tuple(tiles for tiles in (1, 2) if rows * tiles <= 16)
    waves = {ceil_div(key.outputs, rows * gpu.multiprocessors * programs) for programs in range(2, 7)}
    return tuple(sorted({1, 2, 4} | waves))


def _splitks(key: MatmulKey, gpu: GpuTraits) -> Iterator[SplitKPlan]:
    for block_n, block_k, stages, warps in INT4_TILES if key.bits == 4 else SPLITK_TILES:
        if key.inputs % block_k == 0:
            for split in splits(ceil_div(key.outputs, block_n), key.inputs, gpu):
                yield SplitKPlan(block_n, block_k, split, stages, warps)


def splits(tiles: int, inputs: int, gpu: GpuTraits) -> list[int]:
    """List the split-K factors to try.

    One, those that fill the multiprocessors once and twice, and powers of two that neither leave half of them idle nor
    exceed the programs that run concurrently.
    """
    one_wave = split_inputs(tiles, inputs, gpu.multiprocessors)
    least, most = gpu.multiprocessors // 2, PROGRAMS * gpu.multiprocessors
    found = {one_wave}
    for split in (1, 2, 4, MAX_SPLIT, 2 * one_wave):
        if least <= tiles * split <= most and split * MIN_SPLIT_INPUTS <= inputs:
            found.add(split)
    return sorted(found)


def decode_candidates(key: DecodeKey, today: DecodePlan, rule: DecodePlan, gpu: GpuTraits) -> list[DecodePlan]:
    """List the distinct plans of decode attention: the current one, the rule's and others.

    Includes early loads where the GPU has programmatic dependent launch and the tile does not spill.
    """
    found = [today, rule]
    for positions, warps, stages in DECODE_TILES:
        size = positions if key.head_dim <= 128 else positions // 2
        tile = Tile(size, warps, stages)
        found.append(DecodePlan(tile, rule.least, rule.splits))
        if gpu.pdl and _loads_early(key, tile):
            found.append(DecodePlan(tile, rule.least, rule.splits, early=True))
        if key.pairs >= 128:
            found += [DecodePlan(tile, 256, 2), DecodePlan(tile, 512, 4)]
    return [plan for plan in dict.fromkeys(found) if not decode_problem(key, plan)]


def _loads_early(key: DecodeKey, tile: Tile) -> bool:
    return key.head_dim <= 64 or tile[:2] in EARLY_TILES.get((key.head_dim, key.kv_bits), ())
