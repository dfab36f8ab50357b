"""Decode steps of checkpoints that leave some linear layers in 16 bits, against the sum of their parts.

    python -m benchmarks.bench_mixed --shape benchmarks/shapes/llama-3.1-8b --weights fp8-tensor \\
        --exclude '.*\\.o_proj' '.*\\.[0-7]\\.mlp\\.down_proj' [--batches 1 8 64] [--save NAME]

Two engines with random weights, one quantized and one that leaves the excluded layers in 16 bits. The CUDA graphs of
their decode steps are replayed alternately. The step of the second should take as long as that of the first plus, for
each excluded layer, its time in 16 bits minus its quantized time; those are the times of two graphs with these layers
alone, with inputs in the formats of the steps. A layer that is a part of a fused projection in the first engine, such
as v_proj, is timed against a quantized layer of its own. The excess is the cost of what else changes, such as separate
launches and conversions.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, to_builtins

from benchmarks.bench_decode import GREEDY, Bench, replayed_seconds
from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.measuring.results import save
from benchmarks.measuring.weight_formats import FORMATS
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.split_linear import SplitLinear
from tandem.engine_core.layers.torch_linear import TorchLinear
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.sampling.sampler import Mode

ROUNDS, REPLAYS = 9, 40
"""Pairs of timings of the two engines, and graph replays of each."""


class Part(Struct):
    """One linear layer as a model."""

    linear: LinearWeights

    def weight_slots(self) -> list[WeightSlot]:
        """Implement `Loadable.weight_slots`."""
        return self.linear.slots("", "part")


class Step(Struct):
    """Milliseconds of a decode step, and of the excluded layers alone."""

    rows: int
    quantized: float
    mixed: float
    layers_quantized: float
    layers_plain: float
    expected: float
    """`quantized` plus the difference of the layers."""
    excess_percent: float


def excluded_layers(
    quantized: Any, mixed: Any, part: Callable[[Any, int, int], LinearWeights]
) -> list[tuple[LinearWeights, LinearWeights, int]]:
    """Return the layers that are in 16 bits in the second model only, from both, with their numbers of inputs.

    part: returns a layer with the format of another one, and these numbers of outputs and inputs.
    """
    found: list[tuple[LinearWeights, LinearWeights, int]] = []
    for one, other in zip(quantized.layers, mixed.layers, strict=True):
        for first, second in (
            (one.attention.qkv, other.attention.qkv),
            (one.attention.output, other.attention.output),
            (one.mlp.gate_up, other.mlp.gate_up),
            (one.mlp.down, other.mlp.down),
        ):
            if isinstance(second, TorchLinear) and not isinstance(first, TorchLinear):
                found.append((first, second, second.weight.shape[1]))
            for _, own in second.linears if isinstance(second, SplitLinear) else ():
                if isinstance(own, TorchLinear):
                    found.append((part(first, *own.weight.shape), own, own.weight.shape[1]))
    return found


def part_like(fused: Any, outputs: int, inputs: int) -> LinearWeights:
    """Return a layer of random weights with the format of a fused one."""
    device = torch.device("cuda")
    context = triton_build_context(device, torch.bfloat16, read_gpu_traits(), Quantization(fused.scheme))
    part = Part(context.linear("part", outputs, inputs))
    fill_with_noise(part)
    return part.linear


def layers_seconds(layers: list[tuple[LinearWeights, int]], rows: int, kernels: Any) -> float:
    """Time layers one after another in a CUDA graph, in seconds, with inputs in their own formats."""
    launches: list[Callable[[], object]] = []
    for linear, inputs in layers:
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
        to = linear.input_format(rows)
        launches.append(
            partial(linear.apply, x) if to is None else partial(linear.apply_quantized, kernels.quantize(x, to))
        )

    def work() -> None:
        for launch in launches:
            launch()

    return graph_seconds(work)


def measure(quantized: Bench, mixed: Bench, rows: int) -> Step:
    """Time the steps of two engines alternately, and the excluded layers alone."""
    for bench in (quantized, mixed):
        bench.run(rows, 2, GREEDY)
    layers = excluded_layers(quantized.runtime.model, mixed.runtime.model, part_like)
    kernels = mixed.runtime.model.kernels  # type: ignore[attr-defined]
    times: list[tuple[float, float, float, float]] = []
    for _ in range(ROUNDS):
        times.append(
            (
                replayed_seconds(quantized.runtime, rows, Mode.GREEDY, REPLAYS),
                replayed_seconds(mixed.runtime, rows, Mode.GREEDY, REPLAYS),
                layers_seconds([(one, inputs) for one, _, inputs in layers], rows, kernels),
                layers_seconds([(other, inputs) for _, other, inputs in layers], rows, kernels),
            )
        )
    step, mixed_step, alone, plain = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    expected = step + plain - alone
    return Step(rows, step, mixed_step, alone, plain, expected, 100 * (mixed_step / expected - 1))


def line(step: Step) -> str:
    """Format a step as one line."""
    return (
        f"{step.rows:>4} rows: quantized {step.quantized:.3f} ms, mixed {step.mixed:.3f}; excluded layers alone "
        f"{step.layers_quantized:.3f} and {step.layers_plain:.3f}; expected {step.expected:.3f}, "
        f"excess {step.excess_percent:+.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--weights", default="fp8-tensor", choices=[name for name, found in FORMATS.items() if found])
    parser.add_argument(
        "--exclude", nargs="+", required=True, metavar="REGEX", help="layers in 16 bits, by their names"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="rows")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    most = max(arguments.batches)
    quantized = Bench(arguments.shape, most, arguments.weights)
    mixed = Bench(arguments.shape, most, arguments.weights, exclude=arguments.exclude)
    steps = []
    for rows in arguments.batches:
        steps.append(measure(quantized, mixed, rows))
        print(line(steps[-1]), flush=True)
    if arguments.save:
        config = {"shape": arguments.shape.name, "weights": arguments.weights, "exclude": arguments.exclude}
        print(save(arguments.save, config | {"gpu": torch.cuda.get_device_name()}, {"steps": to_builtins(steps)}))


if __name__ == "__main__":
    main()
