"""List candidate plans of W8A8 matmuls."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.tune.candidates import splits
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.quantized_plans import (
    LIBRARY_BLOCK_INPUTS,
    MAX_SPLITK_ROWS,
    SCALE_COLUMNS,
    choose_gated_w8a8_gemm,
    choose_w8a8_gemm,
    fits_w8a8_workspace,
    uses_library_matmul,
)
from tandem.engine_core.kernels.quantized_activation import KNOWN, WHOLE, quantizes_in_tiles
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import NO_TABLE, Scaling, W8A8GemmKey
from tandem.engine_core.kernels.tiles.table_file import w8a8_gemm_problem

TILES = (
    *((128, 64, 5, 4), (128, 64, 4, 4), (128, 128, 3, 8), (128, 128, 4, 8), (64, 128, 4, 4), (64, 64, 6, 4)),
    *((64, 64, 8, 4), (64, 64, 11, 4), (64, 128, 8, 4), (64, 32, 8, 4), (64, 256, 3, 8), (128, 256, 3, 8)),
)
"""Rows, outputs, stages and warps of candidates for many rows."""
FEW_ROW_TILES = (
    *((64, 12, 4, 128), (64, 9, 4, 128), (64, 5, 4, 128), (64, 6, 4, 256), (64, 4, 4, 256)),
    *((128, 6, 4, 128), (128, 4, 4, 256), (128, 4, 8, 256), (32, 9, 4, 128), (32, 6, 4, 256)),
)
"""Outputs, stages, warps and inputs per step of candidates for up to 32 rows."""
GATED_TILES = (
    *((128, 3, 8, 128), (128, 4, 8, 128), (128, 5, 8, 128), (128, 4, 4, 128), (128, 2, 8, 256), (64, 4, 4, 128)),
    *((64, 6, 4, 128), (64, 9, 4, 128), (64, 4, 8, 128), (64, 3, 4, 256), (64, 4, 4, 256), (32, 6, 4, 128)),
)
"""Outputs, stages, warps and inputs per step of candidates with a fused gate."""
GATE_GROUPS: dict[Scaling, int] = {"tensor": KNOWN, "block": SCALE_COLUMNS, "output": WHOLE}
"""Outputs of a gate that share a scale, by scaling."""


def w8a8_chosen(key: W8A8GemmKey, gpu: GpuTraits) -> W8A8GemmPlan | None:
    """Return the plan that the engine chooses; None for the library or a separate gate."""
    if key.gated:
        named = key.kind, key.scaling, GATE_GROUPS[key.scaling]
        return choose_gated_w8a8_gemm(key.rows, key.outputs, key.inputs, *named, gpu)
    given = key.rows, key.outputs, key.inputs, key.kind, key.scaling, gpu
    return None if uses_library_matmul(*given) else choose_w8a8_gemm(*given)


def w8a8_ruled(key: W8A8GemmKey, gpu: GpuTraits) -> W8A8GemmPlan | None:
    """Return the plan that the rules choose without a table."""
    return w8a8_chosen(key, replace(gpu, tiles=NO_TABLE))


def w8a8_candidates(key: W8A8GemmKey, gpu: GpuTraits) -> list[W8A8GemmPlan | None]:
    """List the distinct plans of a matmul: the rule's, the library or a separate gate, others, and the current one."""
    found = [w8a8_ruled(key, gpu)]
    if key.gated or has_library(key, gpu):
        found.append(None)
    found += w8a8_plans(key, gpu)
    return [
        plan
        for plan in dict.fromkeys([*found, w8a8_chosen(key, gpu)])
        if not w8a8_gemm_problem(key, plan) and (plan is None or fits_w8a8_workspace(plan, key.rows, key.outputs, gpu))
    ]


def has_library(key: W8A8GemmKey, gpu: GpuTraits) -> bool:
    """Return whether the library has this matmul with these scales."""
    known = gpu.capability[0] == 9 and key.inputs % LIBRARY_BLOCK_INPUTS == 0
    return key.kind == "fp8" and (key.scaling != "block" or known)


def w8a8_plans(key: W8A8GemmKey, gpu: GpuTraits) -> Iterator[W8A8GemmPlan]:
    """Yield the Triton candidates."""
    for block_m, block_n, stages, warps, block_k in _tiles(key):
        # Block scales are loaded with each step.
        scales = 4 * (block_m + block_n) if key.scaling == "block" else 0
        height = block_m + block_n * (1 + key.gated)
        most = gpu.max_stages(height * block_k + scales, warpgroup=True)
        plan = W8A8GemmPlan(block_m, block_n, 1, min(stages, most), warps, block_k)
        tiles = plan.tiles(key.rows, key.outputs)
        for split in (1,) if key.gated else splits(tiles, key.inputs, gpu):
            yield replace(plan, split=split)


def _tiles(key: W8A8GemmKey) -> list[tuple[int, int, int, int, int]]:
    if key.gated:
        group = GATE_GROUPS[key.scaling]
        return [(key.rows, *tile) for tile in GATED_TILES if quantizes_in_tiles(group, tile[0])]
    if key.rows <= MAX_SPLITK_ROWS:
        return [(key.rows, *tile) for tile in FEW_ROW_TILES]
    return [(*tile, SCALE_COLUMNS) for tile in TILES if tile[0] > 64 or key.rows <= 512]
