"""Products of bytes with bytes as the tuner times them.

A graph runs one over many weights, by a plan of ours or in the library.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.byte_rows import ByteFormat, ByteRows
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import triton_kernels
from tandem.engine_core.kernels.linear.byte_splitk import multiply_bytes
from tandem.engine_core.kernels.linear.plans import split_inputs
from tandem.engine_core.kernels.linear.quantized_plans import (
    LIBRARY_BLOCK_INPUTS,
    SCALE_COLUMNS,
    SCALE_ROWS,
    SPLITK_ROWS,
    byte_gemm_workspace,
    choose_byte_gemm,
    fits_byte_workspace,
    library_multiplies,
)
from tandem.engine_core.kernels.tiles.plan_types import ByteGemmPlan
from tandem.engine_core.kernels.tiles.table import NO_TABLE, ByteKind, ByteProductKey, Scaling
from tandem.engine_core.kernels.tiles.table_file import byte_product_problem
from tandem.engine_core.layers.quantized.byte_products import library_product

FORMATS: dict[str, tuple[ByteKind, Scaling]] = {
    "tensor": ("fp8", "tensor"), "blocks": ("fp8", "block"), "int8": ("int8", "output"), "outputs": ("fp8", "output"),
}  # fmt: skip
"""What is multiplied, by the name of a format."""
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
TILES = (
    *((128, 64, 5, 4), (128, 64, 4, 4), (128, 128, 3, 8), (128, 128, 4, 8), (64, 128, 4, 4), (64, 64, 6, 4)),
    *((64, 64, 8, 4), (64, 64, 11, 4), (64, 128, 8, 4), (64, 32, 8, 4), (64, 256, 3, 8), (128, 256, 3, 8)),
)
"""Rows, outputs, stages and warps of the plans worth trying for many rows."""
FEW_ROW_TILES = (
    *((64, 12, 4, 128), (64, 9, 4, 128), (64, 5, 4, 128), (64, 6, 4, 256), (64, 4, 4, 256)),
    *((128, 6, 4, 128), (128, 4, 4, 256), (128, 4, 8, 256)),
)
"""Outputs, stages, warps and inputs of a step of the plans worth trying for up to 32 rows."""
WORKING_SET, MOST_WEIGHTS, REPLAYS = 256e6, 16, 9


@dataclass
class Operands:
    """Weights of some layers and one input."""

    x: ByteRows
    values: list[Tensor]
    scales: Tensor
    library_scales: Tensor
    partials: Tensor
    counters: Tensor
    pdl: bool

    @classmethod
    def random(cls, key: ByteProductKey, copies: int, gpu: GpuTraits, device: str = "cuda") -> "Operands":
        """Make the operands of a product."""
        dtype, group = DTYPES[key.kind], SCALE_COLUMNS if key.scaling == "block" else None
        known = torch.full((1,), 6 / 448, device=device) if key.scaling == "tensor" else None
        dense = torch.randn(key.rows, key.inputs, device=device, dtype=torch.bfloat16)
        x = triton_kernels(gpu.pdl).quantize(dense, ByteFormat(dtype, group, known))
        noise = (torch.randn(key.outputs, key.inputs, device=device) * 30).clamp(-127, 127).to(dtype)
        scales = torch.full((key.outputs,), key.inputs**-0.5 / 30, device=device)
        wide = scales[:1] if key.scaling == "tensor" else scales
        if group is not None:
            scales = scales[:1].expand(ceil_div(key.outputs, SCALE_ROWS), key.inputs // group).contiguous()
            wide = scales[:: 128 // SCALE_ROWS].contiguous()
        floats, counters = byte_gemm_workspace(gpu)
        space = torch.empty(floats, device=device), torch.zeros(counters, device=device, dtype=torch.int32)
        return cls(x, [noise.clone() for _ in range(copies)], scales, wide, *space, gpu.pdl)

    def run(self, plan: ByteGemmPlan | None) -> list[Tensor]:
        """Return the product with every weight, by a plan or in the library."""
        if plan is None:
            return [library_product(self.x, values, self.library_scales, None) for values in self.values]
        space = self.partials, self.counters
        return [
            multiply_bytes(self.x, values, self.scales, None, plan, *space, True, self.pdl) for values in self.values
        ]  # fmt: skip


def byte_chosen(key: ByteProductKey, gpu: GpuTraits) -> ByteGemmPlan | None:
    """Return the plan that the engine would take, None for the library."""
    given = key.rows, key.outputs, key.inputs, key.kind, key.scaling, gpu
    return None if library_multiplies(*given) else choose_byte_gemm(*given)


def byte_candidates(key: ByteProductKey, gpu: GpuTraits) -> list[ByteGemmPlan | None]:
    """List the plans of a product, without repetition.

    They are today's, the rule's, the library's and others that fit the GPU.
    """
    bare = replace(gpu, tiles=NO_TABLE)
    found = [byte_chosen(key, gpu), byte_chosen(key, bare)]
    if has_library(key, gpu):
        found.append(None)
    found += byte_plans(key, gpu)
    return [
        plan
        for plan in dict.fromkeys(found)
        if not byte_product_problem(key, plan)
        and (plan is None or fits_byte_workspace(plan, key.rows, key.outputs, gpu))
    ]


def has_library(key: ByteProductKey, gpu: GpuTraits) -> bool:
    """Return whether the library multiplies such bytes and scales their sums."""
    known = gpu.capability[0] == 9 and key.inputs % LIBRARY_BLOCK_INPUTS == 0
    return key.kind == "fp8" and (key.scaling != "block" or known)


def byte_plans(key: ByteProductKey, gpu: GpuTraits) -> Iterator[ByteGemmPlan]:
    """Yield the plans of ours that are worth trying."""
    for block_m, block_n, stages, warps, block_k in _tiles(key):
        most = gpu.max_stages((block_m + block_n) * block_k, warpgroup=True)
        plan = ByteGemmPlan(block_m, block_n, 1, min(stages, most), warps, block_k)
        tiles = plan.tiles(key.rows, key.outputs)
        one_wave = split_inputs(tiles, key.inputs, gpu.multiprocessors)
        for split in dict.fromkeys((one_wave, 2 * one_wave)):
            if split == one_wave or tiles * split < 2 * gpu.multiprocessors:
                yield replace(plan, split=split)


def _tiles(key: ByteProductKey) -> list[tuple[int, int, int, int, int]]:
    if key.rows <= SPLITK_ROWS:
        return [(key.rows, *tile) for tile in FEW_ROW_TILES]
    return [(*tile, SCALE_COLUMNS) for tile in TILES if tile[0] > 64 or key.rows <= 512]


class ByteTimer:
    """Timer of products of bytes with bytes, which keeps the weights of the last one."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.gpu = gpu
        self._kept: tuple[ByteProductKey, Operands] | None = None

    def __call__(self, key: ByteProductKey, plan: ByteGemmPlan | None) -> float:
        """Return the microseconds of one product."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            copies = max(1, min(MOST_WEIGHTS, int(WORKING_SET / (key.outputs * key.inputs)) + 1))
            self._kept = key, Operands.random(key, copies, self.gpu)
        operands = self._kept[1]
        return graph_seconds(lambda: operands.run(plan), REPLAYS) * 1e6 / len(operands.values)


def compile_byte_product(key: ByteProductKey, plan: ByteGemmPlan | None, gpu: GpuTraits) -> None:
    """Run a plan once over few rows and outputs.

    Its code is in Triton's cache then.
    """
    Operands.random(key._replace(rows=min(key.rows, 128), outputs=256), 1, gpu).run(plan)
    torch.cuda.synchronize()
