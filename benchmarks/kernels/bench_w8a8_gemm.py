"""Products of bytes with bytes for many rows on a GPU.

The library's stand beside plans of ours, and 16 bits.

    python -m benchmarks.kernels.bench_w8a8_gemm --model 8b --rows 128 256 2048 --formats blocks outputs int8 tensor

A figure is the time of one product in microseconds, over the weights of 8 layers in a CUDA graph. Rounding the inputs
is not part of it, and is reported by itself: alone, and as what it adds to a norm. The plan that the engine takes is
marked "chosen".
"""

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.bench_linear import EPS, MODELS, Shape, graph_time, random_rows
from benchmarks.tune.w8a8_candidates import w8a8_plans
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import triton_kernels
from tandem.engine_core.kernels.linear.quantized_plans import (
    SCALE_COLUMNS,
    SCALE_ROWS,
    choose_w8a8_gemm,
    w8a8_workspace,
)
from tandem.engine_core.kernels.linear.w8a8_splitk import w8a8_matmul
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import EightBitKind, Scaling, W8A8GemmKey
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import library_matmul
from tandem.engine_core.runtime.device import read_gpu_traits

COPIES = 8
PEAK = 790e12
"""Operations per second of 16-bit products on the H200; bytes have at most twice as many."""
PRODUCTS = ("qkv", "o", "gate_up", "down")
FORMATS: dict[str, tuple[EightBitKind, Scaling]] = {
    "tensor": ("fp8", "tensor"), "blocks": ("fp8", "block"), "int8": ("int8", "output"), "outputs": ("fp8", "output"),
}  # fmt: skip
"""What is multiplied, by the name of a format."""
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass
class Operands:
    """Weights of some layers and one input."""

    x: QuantizedActivation
    values: list[Tensor]
    scales: Tensor
    library_scales: Tensor
    partials: Tensor
    counters: Tensor
    pdl: bool

    @classmethod
    def random(cls, key: W8A8GemmKey, copies: int, gpu: GpuTraits, device: str = "cuda") -> "Operands":
        """Make the operands of a product."""
        dtype, group = DTYPES[key.kind], SCALE_COLUMNS if key.scaling == "block" else None
        known = torch.full((1,), 6 / 448, device=device) if key.scaling == "tensor" else None
        dense = torch.randn(key.rows, key.inputs, device=device, dtype=torch.bfloat16)
        x = triton_kernels(gpu.pdl).quantize(dense, ActivationFormat(dtype, group, known))
        noise = (torch.randn(key.outputs, key.inputs, device=device) * 30).clamp(-127, 127).to(dtype)
        scales = torch.full((key.outputs,), key.inputs**-0.5 / 30, device=device)
        wide = scales[:1] if key.scaling == "tensor" else scales
        if group is not None:
            scales = scales[:1].expand(ceil_div(key.outputs, SCALE_ROWS), key.inputs // group).contiguous()
            wide = scales[:: 128 // SCALE_ROWS].contiguous()
        floats, counters = w8a8_workspace(gpu)
        space = torch.empty(floats, device=device), torch.zeros(counters, device=device, dtype=torch.int32)
        return cls(x, [noise.clone() for _ in range(copies)], scales, wide, *space, gpu.pdl)

    def run(self, plan: W8A8GemmPlan | None) -> list[Tensor]:
        """Return the product with every weight, by a plan or in the library."""
        if plan is None:
            return [library_matmul(self.x, values, self.library_scales, None) for values in self.values]
        space = self.partials, self.counters
        return [
            w8a8_matmul(self.x, values, self.scales, None, plan, *space, True, self.pdl) for values in self.values
        ]  # fmt: skip


def key_of(name: str, rows: int, shape: Shape) -> W8A8GemmKey:
    """Return a product of a format as the tile tables name it, but for its rows."""
    return W8A8GemmKey(*FORMATS[name], *shape, rows)


@cache
def candidates(name: str, rows: int, shape: Shape) -> tuple[W8A8GemmPlan, ...]:
    """Return the plans worth trying for a format, the chosen one first."""
    gpu, key = read_gpu_traits(), key_of(name, rows, shape)
    chosen = choose_w8a8_gemm(rows, *shape, key.kind, key.scaling, gpu)
    assert chosen is not None
    return tuple(dict.fromkeys((chosen, *w8a8_plans(key, gpu))))


def compile_plan(job: tuple[str, int, Shape, W8A8GemmPlan]) -> None:
    """Run a plan once, so that its code is in Triton's cache."""
    name, rows, shape, plan = job
    Operands.random(key_of(name, rows, shape), 1, read_gpu_traits()).run(plan)
    torch.cuda.synchronize()


def jobs(formats: list[str], model: str, row_counts: list[int]) -> Iterator[tuple[str, int, Shape, W8A8GemmPlan]]:
    """Yield what is to be compiled, each variant once."""
    seen = set()
    for name in formats:
        for product in PRODUCTS:
            shape = MODELS[model][product]
            for rows in row_counts:
                for plan in candidates(name, rows, shape):
                    if (name, shape[1], plan) not in seen:
                        seen.add((name, shape[1], plan))
                        yield name, rows, shape, plan


def measure(formats: list[str], model: str, row_counts: list[int]) -> list[dict[str, Any]]:
    """Time every product, a line for each."""
    records: list[dict[str, Any]] = []
    for product in PRODUCTS:
        shape = MODELS[model][product]
        weights = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]
        for rows in row_counts:
            x = random_rows(rows, shape[1])
            usual = graph_time(lambda x=x, weights=weights: [functional.linear(x, w) for w in weights]) / COPIES
            least = 2e6 * rows * shape[0] * shape[1] / PEAK
            for name in formats:
                operands = Operands.random(key_of(name, rows, shape), COPIES, read_gpu_traits())
                library = graph_time(lambda of=operands: of.run(None)) / COPIES
                timed = [
                    (graph_time(lambda plan=plan, of=operands: of.run(plan)) / COPIES, plan)
                    for plan in candidates(name, rows, shape)
                ]
                chosen, (best, plan) = timed[0][0], min(timed, key=lambda pair: pair[0])
                records.append(
                    {"product": product, "rows": rows, "format": name, "bf16": usual, "library": library}
                    | {"chosen": chosen, "best": best, "plan": str(plan)}
                )
                print(
                    f"{product:8} M={rows:<5} {name:8} bf16 {usual:8.1f} (peak {least:7.1f})  library {library:8.1f}  "
                    f"chosen {chosen:8.1f}  best {best:8.1f} {_short(plan)}",
                    flush=True,
                )
                del operands
    return records


def _short(plan: W8A8GemmPlan) -> str:
    return f"{plan.block_m}x{plan.block_n} split {plan.split} stages {plan.stages} warps {plan.warps}"


def measure_rounding(formats: list[str], model: str, row_counts: list[int]) -> None:
    """Time the rounding of inputs: alone, in the norm and in the gate."""
    kernels = triton_kernels(True)
    hidden, width = MODELS[model]["qkv"][1], MODELS[model]["down"][1]
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    for rows in row_counts:
        x, stream = random_rows(rows, hidden), random_rows(rows, hidden)
        gate_up = random_rows(rows, 2 * width)

        def time(work: Callable[[], object]) -> float:
            return graph_time(lambda: [work() for _ in range(COPIES)]) / COPIES

        norm = time(lambda x=x, stream=stream: kernels.add_rms_norm(x, stream, weight, EPS, None))
        gate = time(lambda gate_up=gate_up: kernels.gated_activation(gate_up, Activation.SILU))
        print(f"M={rows:<5} 16 bits   norm {norm:6.1f}  gate {gate:6.1f}", flush=True)
        for name in formats:
            dtype, group = DTYPES[FORMATS[name][0]], 128 if name == "blocks" else None
            to = ActivationFormat(dtype, group, torch.ones(1, device="cuda") if name == "tensor" else None)
            alone = time(lambda x=x, to=to: kernels.quantize(x, to))
            norm = time(lambda x=x, s=stream, to=to: kernels.quantized_norm(x, s, None, weight, EPS, to))
            gate = time(lambda gate_up=gate_up, to=to: kernels.quantized_gate(gate_up, Activation.SILU, to))
            print(f"M={rows:<5} {name:8}  norm {norm:6.1f}  gate {gate:6.1f}  alone {alone:6.1f}", flush=True)


def main() -> None:
    """Parse arguments, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 2048, 8192])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        compiled = list(jobs(arguments.formats, arguments.model, arguments.rows))
        with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=14) as pool:
            list(pool.map(compile_plan, compiled, chunksize=4))
        print(f"{len(compiled)} variants compiled", flush=True)
        measure_rounding(arguments.formats, arguments.model, arguments.rows)
        records = measure(arguments.formats, arguments.model, arguments.rows)
    if arguments.out:
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
