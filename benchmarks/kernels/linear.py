"""16-bit linear layers of a decode step: Triton compared with cuBLAS.

Each figure is taken over the weights of 16 layers, which exceed the L2 cache and are read once per replay. With
--sweep, every candidate plan of every shape is timed instead.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.suite import LAYERS, READ_GB_PER_S, Model, Options, Record, compile_all, random_rows
from benchmarks.measuring.graph_timing import graph_microseconds
from benchmarks.measuring.linear_layers import EPS, LINEAR_NAMES, Shape
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gated_activation import gated_activation
from tandem.engine_core.kernels.linear.gemv import gemv
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.norm import add_rms_norm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan, SplitKPlan
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.triton_linear import TritonLinear
from tandem.engine_core.runtime.device import read_gpu_traits

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
Apply = Callable[[Tensor, TritonLinear], Tensor]


def tandem_linear(x: Tensor, linear: TritonLinear) -> Tensor:
    """Run the linear layer with the plan the engine chooses."""
    return linear.apply(x)


def cublas_linear(x: Tensor, linear: TritonLinear) -> Tensor:
    """Run the linear layer using cuBLAS."""
    return functional.linear(x, linear.weight)


def candidates(rows: int, outputs: int, inputs: int) -> Iterator[Plan]:
    """Yield the plans worth trying."""
    if rows == 1:
        for block_k in (512, 1024, 2048):
            for height in (2, 4, 8):
                for warps in (4, 8):
                    if ceil_div(inputs, block_k) < 30 and block_k >= warps * 128:
                        yield GemvPlan(height, block_k, 1, warps)
        return
    for block_n, block_k, stages in (
        (64, 128, 3),
        (64, 128, 4),
        (64, 128, 6),
        (64, 64, 6),
        (64, 256, 3),
        (128, 128, 3),
        (128, 64, 4),
    ):
        for split in (1, 2, 3, 4, 6, 8):
            programs = outputs // block_n * split
            fits = inputs % block_k == 0 and split * block_k <= inputs and programs >= 90
            if fits and (split == 1 or programs <= 530) and (block_n + max(rows, 16)) * block_k * stages < 115000:
                yield SplitKPlan(block_n, block_k, split, stages)


def planned_linear(plan: Plan) -> Apply:
    """Return a function that runs a linear layer with a plan; cuBLAS without one."""
    if isinstance(plan, GemvPlan):
        return lambda x, linear: gemv(x, linear.weight, None, plan, pdl=linear.gpu.pdl)
    if isinstance(plan, SplitKPlan):
        partials = torch.empty(1 << 24, device="cuda")
        counters = torch.zeros(1 << 12, device="cuda", dtype=torch.int32)
        return lambda x, linear: splitk_gemm(x, linear.weight, None, plan, partials, counters, pdl=linear.gpu.pdl)
    return cublas_linear


def new_context() -> BuildContext:
    return triton_build_context(torch.device("cuda"), torch.bfloat16, read_gpu_traits())


def make_weights(context: BuildContext, shape: Shape, copies: int) -> list[TritonLinear]:
    """Build random weights, scaled like a trained layer's."""
    found = []
    for _ in range(copies):
        linear = context.linear("proj", *shape)
        assert isinstance(linear, TritonLinear)
        linear.weight.normal_(std=shape[1] ** -0.5)
        found.append(linear)
    return found


def time_linear(apply: Apply, linears: list[TritonLinear], rows: int) -> float:
    """Return the microseconds of one linear layer."""
    x = random_rows(rows, linears[0].weight.shape[1])
    return graph_microseconds([partial(apply, x, linear) for linear in linears])


def compile_plan(job: tuple[int, Shape, Plan]) -> None:
    """Run a plan once, in a process of its own, to fill Triton's cache."""
    rows, shape, plan = job
    planned_linear(plan)(random_rows(rows, shape[1]), *make_weights(new_context(), shape, 1))
    torch.cuda.synchronize()


def measure(options: Options) -> list[Record]:
    """Compare with cuBLAS, or time every candidate plan."""
    return (sweep if options.sweep else compare)(options.model, options.rows or ROWS)


def sweep(model: Model, row_counts: tuple[int, ...]) -> list[Record]:
    """Time every candidate and print the best three of each shape."""
    shapes = model.linears
    compile_all(
        compile_plan,
        [(rows, shape, plan) for rows in row_counts for shape in shapes.values() for plan in candidates(rows, *shape)],
    )
    records = []
    for name, shape in shapes.items():
        weights = make_weights(new_context(), shape, 1 if name == "head" else LAYERS)
        for rows in row_counts:
            plans: list[Plan] = [None, *candidates(rows, *shape)]
            results = sorted((time_linear(planned_linear(plan), weights, rows), str(plan)) for plan in plans)
            print(name, rows, *(f"{us:.2f} {plan}" for us, plan in results[:3]), sep="  ", flush=True)
            records += [{"linear": name, "rows": rows, "plan": plan, "us": us} for us, plan in results]
    return records


class Step:
    """Linear layers of a model, with or without the operations between them.

    Attention is left out.
    """

    def __init__(self, model: Model) -> None:
        context = new_context()
        self.weights = {
            name: make_weights(context, shape, 1 if name == "head" else LAYERS) for name, shape in model.linears.items()
        }
        self.inputs = {name: shape[1] for name, shape in model.linears.items()}
        norm_weight = torch.ones(self.inputs["qkv"], device="cuda", dtype=torch.bfloat16)
        self.norm = RMSNorm(norm_weight, EPS, context.kernels)

    def linears(self, apply: Apply, rows: int, head: bool) -> float:
        """Return the microseconds of the linear layers alone."""
        x = {name: random_rows(rows, width) for name, width in self.inputs.items()}

        def chain() -> None:
            for layer in range(LAYERS):
                for name in LINEAR_NAMES:
                    apply(x[name], self.weights[name][layer])
            if head:
                apply(x["head"], self.weights["head"][0])

        return graph_microseconds([chain])

    def whole(self, rows: int, apply: Apply | None) -> float:
        """Return the microseconds with norms, residual stream and SwiGLU.

        apply: runs each linear layer alone; None runs the fused kernels.
        """
        hidden, attended = self.inputs["qkv"], self.inputs["o"]
        update, residual = random_rows(rows, hidden), random_rows(rows, hidden)
        norm, weights = self.norm, self.weights

        def normed(
            x: Tensor, stream: Tensor, linear: TritonLinear, activation: Activation | None
        ) -> tuple[Tensor, Tensor]:
            if apply is None:
                return linear.apply_normed(x, stream, norm, activation)
            y, stream = add_rms_norm(x, stream, norm.weight, EPS, pdl=True)
            y = apply(y, linear)
            return (y if activation is None else gated_activation(y, activation, pdl=True)), stream

        def chain() -> None:
            x, stream = update, residual
            plain = apply or tandem_linear
            for layer in range(LAYERS):
                y, stream = normed(x, stream, weights["qkv"][layer], None)
                x = plain(y.view(-1)[: rows * attended].view(rows, attended), weights["o"][layer])
                y, stream = normed(x, stream, weights["gate_up"][layer], Activation.SILU)
                x = plain(y, weights["down"][layer])
            normed(x, stream, weights["head"][0], None)

        return graph_microseconds([chain])


def compare(model: Model, row_counts: tuple[int, ...]) -> list[Record]:
    """Compare the chosen plans with cuBLAS, per linear layer and as a whole."""
    step = Step(model)
    records: list[Record] = []
    for name, linears in step.weights.items():
        nbytes = linears[0].weight.nbytes
        for rows in row_counts:
            planned, cublas = (time_linear(apply, linears, rows) for apply in (tandem_linear, cublas_linear))
            records.append({"linear": name, "rows": rows, "tandem": planned, "cublas": cublas, "bytes": nbytes})
            rate = nbytes / 1e3 / planned
            print(
                f"{name:8} M={rows:<4} cuBLAS {cublas:7.2f} us {nbytes / 1e3 / cublas:5.0f} GB/s   "
                f"Tandem {planned:7.2f} us {rate:5.0f} GB/s = {rate / READ_GB_PER_S:.0%} of peak",
                flush=True,
            )
    for rows in row_counts:
        figures = {
            "layers, cuBLAS": step.linears(cublas_linear, rows, False),
            "layers, Tandem": step.linears(tandem_linear, rows, False),
            "with head, cuBLAS": step.linears(cublas_linear, rows, True),
            "with head, Tandem": step.linears(tandem_linear, rows, True),
            "with norms and SwiGLU, cuBLAS": step.whole(rows, cublas_linear),
            "with norms and SwiGLU, unfused": step.whole(rows, tandem_linear),
            "with norms and SwiGLU, fused": step.whole(rows, None),
        }
        records.append({"linear": "step", "rows": rows, **figures})
        print(f"M={rows}", *(f"{name} {us:.0f}" for name, us in figures.items()), sep="  ", flush=True)
    return records
