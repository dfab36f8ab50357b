"""W8A8 GEMMs (FP8 and INT8) for many rows: Triton and the library compared with bf16.

Each figure is the time of one GEMM in microseconds, over the weights of 8 layers. Quantizing the inputs is reported
separately: alone, and fused into a norm and a gated activation. With --sweep, every candidate plan is timed next to the
one that the engine chooses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.suite import PEAK_FLOPS, Model, Options, Record, compile_all, random_rows
from benchmarks.measuring.graph_timing import graph_microseconds
from benchmarks.measuring.linear_layers import EPS, LINEAR_NAMES, Shape
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

ROWS = (128, 256, 512, 2048, 8192)
COPIES = 8
FORMATS: dict[str, tuple[EightBitKind, Scaling]] = {
    "fp8 tensor": ("fp8", "tensor"),
    "fp8 block": ("fp8", "block"),
    "fp8 channel": ("fp8", "output"),
    "int8 channel": ("int8", "output"),
}
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
        """Make the operands of a GEMM."""
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
        """Multiply by every weight, using a plan, or the library for None."""
        if plan is None:
            return [library_matmul(self.x, values, self.library_scales, None) for values in self.values]
        space = self.partials, self.counters
        return [w8a8_matmul(self.x, values, self.scales, None, plan, *space, True, self.pdl) for values in self.values]


def key_of(name: str, rows: int, shape: Shape) -> W8A8GemmKey:
    """Return the tile-table key of a GEMM."""
    return W8A8GemmKey(*FORMATS[name], *shape, rows)


def candidates(name: str, rows: int, shape: Shape, sweep: bool) -> list[W8A8GemmPlan]:
    """List the plans to time: the engine's choice, then with `sweep` every other candidate."""
    gpu, key = read_gpu_traits(), key_of(name, rows, shape)
    chosen = choose_w8a8_gemm(rows, *shape, key.kind, key.scaling, gpu)
    assert chosen is not None
    return list(dict.fromkeys((chosen, *(w8a8_plans(key, gpu) if sweep else ()))))


def compile_plan(job: tuple[str, int, Shape, W8A8GemmPlan]) -> None:
    """Run a plan once, in a process of its own, to fill Triton's cache."""
    name, rows, shape, plan = job
    Operands.random(key_of(name, rows, shape), 1, read_gpu_traits()).run(plan)
    torch.cuda.synchronize()


def compile_jobs(model: Model, row_counts: tuple[int, ...]) -> Iterator[tuple[str, int, Shape, W8A8GemmPlan]]:
    """Yield one job for each kernel variant of a sweep."""
    seen = set()
    for name in FORMATS:
        for shape in (model.linears[linear] for linear in LINEAR_NAMES):
            for rows in row_counts:
                for plan in candidates(name, rows, shape, sweep=True):
                    if (name, shape[1], plan) not in seen:
                        seen.add((name, shape[1], plan))
                        yield name, rows, shape, plan


def measure(options: Options) -> list[Record]:
    """Time input quantization and every GEMM."""
    rows = options.rows or ROWS
    if options.sweep:
        compile_all(compile_plan, list(compile_jobs(options.model, rows)))
    return measure_quantization(options.model, rows) + measure_gemms(options.model, rows, options.sweep)


def measure_gemms(model: Model, row_counts: tuple[int, ...], sweep: bool) -> list[Record]:
    """Time every GEMM in every format."""
    records: list[Record] = []
    for linear in LINEAR_NAMES:
        shape = model.linears[linear]
        weights = [random_rows(*shape) for _ in range(COPIES)]
        for rows in row_counts:
            x = random_rows(rows, shape[1])
            bf16 = graph_microseconds([partial(functional.linear, x, weight) for weight in weights])
            bound = 2e6 * rows * shape[0] * shape[1] / PEAK_FLOPS
            for name in FORMATS:
                operands = Operands.random(key_of(name, rows, shape), COPIES, read_gpu_traits())
                library = graph_microseconds([partial(operands.run, None)]) / COPIES
                timed = [
                    (graph_microseconds([partial(operands.run, plan)]) / COPIES, plan)
                    for plan in candidates(name, rows, shape, sweep)
                ]
                chosen, (best, plan) = timed[0][0], min(timed, key=lambda pair: pair[0])
                records.append(
                    {"linear": linear, "rows": rows, "format": name, "bf16": bf16, "library": library}
                    | {"chosen": chosen, "best": best, "plan": str(plan)}
                )
                print(
                    f"{linear:8} M={rows:<5} {name:12} bf16 {bf16:8.1f} (bound {bound:7.1f})  library {library:8.1f}  "
                    f"chosen {chosen:8.1f}  best {best:8.1f} {_short(plan)}",
                    flush=True,
                )
                del operands
    return records


def _short(plan: W8A8GemmPlan) -> str:
    return f"{plan.block_m}x{plan.block_n} split {plan.split} stages {plan.stages} warps {plan.warps}"


def measure_quantization(model: Model, row_counts: tuple[int, ...]) -> list[Record]:
    """Time quantizing the inputs: alone, in the norm and in the gated activation."""
    kernels = triton_kernels(True)
    hidden, width = model.linears["qkv"][1], model.linears["down"][1]
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    records: list[Record] = []

    def record(rows: int, name: str, **launches: Callable[[], object]) -> None:
        times = {launch: graph_microseconds([work] * COPIES) for launch, work in launches.items()}
        print(f"M={rows:<5} {name:12}", *(f"{launch} {us:.1f}" for launch, us in times.items()), sep="  ", flush=True)
        records.append({"rows": rows, "format": name, **times})

    for rows in row_counts:
        x, stream, gate_up = random_rows(rows, hidden), random_rows(rows, hidden), random_rows(rows, 2 * width)
        record(
            rows,
            "bf16",
            norm=partial(kernels.add_rms_norm, x, stream, weight, EPS, None),
            gate=partial(kernels.gated_activation, gate_up, Activation.SILU),
        )
        for name, (kind, scaling) in FORMATS.items():
            group = SCALE_COLUMNS if scaling == "block" else None
            scale = torch.ones(1, device="cuda") if scaling == "tensor" else None
            to = ActivationFormat(DTYPES[kind], group, scale)
            record(
                rows,
                name,
                norm=partial(kernels.quantized_norm, x, stream, None, weight, EPS, to),
                gate=partial(kernels.quantized_gate, gate_up, Activation.SILU, to),
                alone=partial(kernels.quantize, x, to),
            )
    return records
