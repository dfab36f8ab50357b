"""Linear layers of a decode step on a GPU: Triton beside cuBLAS.

Launches are timed in CUDA graphs.

    python -m benchmarks.kernels.bench_linear --model 1b --rows 1 8 64
    python -m benchmarks.kernels.bench_linear --model 1b --rows 8 --sweep   # every candidate plan of every shape

Every number is over the weights of 16 different layers, read once per replay: far more than the cache holds.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring.graph_timing import graph_seconds
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

CEILING = 4385.0
"""Bandwidth in GB/s of a large read on the H200."""
LAYERS = 16
REPLAYS = 30
EPS = 1e-5
Shape = tuple[int, int]
MODELS: dict[str, dict[str, Shape]] = {
    "1b": {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate_up": (16384, 2048),
        "down": (2048, 8192),
        "head": (128256, 2048),
    },
    "8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "4b": {
        "qkv": (6144, 2560),
        "o": (2560, 4096),
        "gate_up": (19456, 2560),
        "down": (2560, 9728),
        "head": (151936, 2560),
    },
}
Apply = Callable[[Tensor, TritonLinear], Tensor]


def ours(x: Tensor, linear: TritonLinear) -> Tensor:
    """Multiply by the chosen plan."""
    return linear.apply(x)


def library(x: Tensor, linear: TritonLinear) -> Tensor:
    """Multiply by cuBLAS."""
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


def product(plan: Plan) -> Apply:
    """Return the function that multiplies by a plan."""
    if isinstance(plan, GemvPlan):
        return lambda x, linear: gemv(x, linear.weight, None, plan, pdl=linear.gpu.pdl)
    if isinstance(plan, SplitKPlan):
        partials = torch.empty(1 << 24, device="cuda")
        counters = torch.zeros(1 << 12, device="cuda", dtype=torch.int32)
        return lambda x, linear: splitk_gemm(x, linear.weight, None, plan, partials, counters, pdl=linear.gpu.pdl)
    return library


def graph_time(chain: Callable[[], object]) -> float:
    """Return the median time of a replay of the chain in a graph, in microseconds."""
    return graph_seconds(chain, REPLAYS) * 1e6


def new_context() -> BuildContext:
    return triton_build_context(torch.device("cuda"), torch.bfloat16, read_gpu_traits())


def make_weights(context: BuildContext, shape: Shape, copies: int) -> list[TritonLinear]:
    """Build random weights, scaled like a trained layer's."""
    found = []
    for _ in range(copies):
        linear = context.linear_method.build(*shape, False, context)
        assert isinstance(linear, TritonLinear)
        linear.weight.normal_(std=shape[1] ** -0.5)
        found.append(linear)
    return found


def random_rows(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)


def time_shape(apply: Apply, linears: list[TritonLinear], rows: int) -> float:
    """Return the time of one product in microseconds."""
    x = random_rows(rows, linears[0].weight.shape[1])
    return graph_time(lambda: [apply(x, linear) for linear in linears]) / len(linears)


def compile_plan(job: tuple[int, Shape, Plan]) -> None:
    """Run a plan once, so that its code is in Triton's cache.

    The job runs in a process of its own.
    """
    rows, shape, plan = job
    product(plan)(random_rows(rows, shape[1]), *make_weights(new_context(), shape, 1))
    torch.cuda.synchronize()


def sweep(model: str, row_counts: list[int]) -> list[dict[str, Any]]:
    """Time every candidate and print the best three of each shape."""
    jobs = [
        (rows, shape, p) for rows in row_counts for shape in MODELS[model].values() for p in candidates(rows, *shape)
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=12) as pool:
        list(pool.map(compile_plan, jobs, chunksize=4))
    records = []
    for name, shape in MODELS[model].items():
        weights = make_weights(new_context(), shape, 1 if name == "head" else LAYERS)
        for rows in row_counts:
            plans: list[Plan] = [None, *candidates(rows, *shape)]
            results = sorted((time_shape(product(plan), weights, rows), str(plan)) for plan in plans)
            print(name, rows, *(f"{us:.2f} {plan}" for us, plan in results[:3]), sep="  ", flush=True)
            records += [{"shape": name, "rows": rows, "plan": plan, "us": us} for us, plan in results]
    return records


class Step:
    """Linear layers of a model, with or without the operations between them.

    Attention is left out.
    """

    def __init__(self, model: str) -> None:
        context = new_context()
        shapes = MODELS[model]
        self.weights = {
            name: make_weights(context, shape, 1 if name == "head" else LAYERS) for name, shape in shapes.items()
        }
        self.inputs = {name: shape[1] for name, shape in shapes.items()}
        norm_weight = torch.ones(self.inputs["qkv"], device="cuda", dtype=torch.bfloat16)
        self.norm = RMSNorm(norm_weight, EPS, context.kernels)

    def linears(self, apply: Apply, rows: int, head: bool) -> float:
        """Return the time of the products alone, in microseconds."""
        x = {name: random_rows(rows, width) for name, width in self.inputs.items()}

        def chain() -> None:
            for layer in range(LAYERS):
                for name in ("qkv", "o", "gate_up", "down"):
                    apply(x[name], self.weights[name][layer])
            if head:
                apply(x["head"], self.weights["head"][0])

        return graph_time(chain)

    def whole(self, rows: int, apply: Apply | None) -> float:
        """Return the time with norms, residual stream and SwiGLU, in microseconds.

        apply: computes each product alone; None runs the fused kernels.
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
            plain = apply or ours
            for layer in range(LAYERS):
                y, stream = normed(x, stream, weights["qkv"][layer], None)
                x = plain(y.view(-1)[: rows * attended].view(rows, attended), weights["o"][layer])
                y, stream = normed(x, stream, weights["gate_up"][layer], Activation.SILU)
                x = plain(y, weights["down"][layer])
            normed(x, stream, weights["head"][0], None)

        return graph_time(chain)


def compare(model: str, row_counts: list[int]) -> list[dict[str, Any]]:
    """Time the chosen plans beside cuBLAS, product by product and together."""
    step, records = Step(model), []
    for name, linears in step.weights.items():
        size = linears[0].weight.nbytes / 1e3
        for rows in row_counts:
            planned, cublas = (time_shape(apply, linears, rows) for apply in (ours, library))
            records.append(
                {"what": name, "rows": rows, "ours": planned, "cublas": cublas, "bytes": linears[0].weight.nbytes}
            )
            print(
                f"{model} {name:8} M={rows:<4} cuBLAS {cublas:7.2f} us {size / cublas:5.0f} GB/s   "
                f"ours {planned:7.2f} us {size / planned:5.0f} GB/s = {size / planned / CEILING:.0%} of the ceiling"
            )
    for rows in row_counts:
        figures = {
            "layers, cuBLAS": step.linears(library, rows, False),
            "ours": step.linears(ours, rows, False),
            "with head, cuBLAS": step.linears(library, rows, True),
            "ours too": step.linears(ours, rows, True),
            "with norms and SwiGLU, cuBLAS": step.whole(rows, library),
            "ours, unfused": step.whole(rows, ours),
            "fused": step.whole(rows, None),
        }
        records.append({"what": "step", "rows": rows, **figures})
        print(f"{model} M={rows}", *(f"{what} {us:.0f}" for what, us in figures.items()), sep="  ", flush=True)
    return records


def main() -> None:
    """Parse arguments, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", choices=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--sweep", action="store_true", help="time every candidate plan")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        records = (sweep if args.sweep else compare)(args.model, args.rows)
    if args.out:
        args.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
