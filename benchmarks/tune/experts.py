"""Tune the matmuls of mixtures of experts on this GPU, and write them to its tile table.

    python -m benchmarks.tune.experts --model qwen3-30b-a3b [--bits 16 8] [--tokens 1 8 64 256 8192] [--minutes 4]

--model: a folder with a config.json, or a name in benchmarks/shapes; --bits: of weights, 8 for FP8 in blocks, 4 for
INT4 in groups of 128. Layers with different weights run in one CUDA graph as in the engine, from the norm to the sum of
the experts, with uniform routing. A plan replaces the current one if the layers are faster with it in each of three
trials.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import version as torch_version

from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.tune.shapes import model_folder
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.moe.plans import GEMV_TOKENS, choose_expert_plan, expert_rule
from tandem.engine_core.kernels.tiles.plan_types import ExpertPlan, GemvPlan, GroupedPlan
from tandem.engine_core.kernels.tiles.table import EXPERT_BUCKETS, ExpertKey, ExpertPart
from tandem.engine_core.kernels.tiles.table_file import expert_problem, packaged, write_table
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.triton_experts import TritonExperts
from tandem.engine_core.layers.triton_int4_experts import TritonInt4Experts
from tandem.engine_core.model_config import ModelConfig, MoEConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme
from tandem.engine_core.runtime.device import read_gpu_traits

PARTS: tuple[ExpertPart, ...] = ("gate_up", "down")
SCHEMES = {
    16: None,
    8: EightBitScheme("fp8", Activations.TOKEN, "weight_scale_inv", block=(128, 128)),
    4: Int4Scheme("compressed-tensors", 128, symmetric=True),
}
WEIGHT_BYTES = 12e9
"""Bytes of the layers that run one after the other: more than a step's experts leave in the L2 cache."""
TRIALS = 3
PAIR_TOKENS = 16
"""Maximum number of tokens for which GEMVs of pairs are tried as well."""
Plans = dict[ExpertKey, ExpertPlan]


def candidates(key: ExpertKey, pairs: bool) -> Iterator[ExpertPlan]:
    """Yield the plans that the kernels accept. pairs: those that make each pair a GEMV."""
    found: list[ExpertPlan] = []
    if pairs:
        blocks = (256, 512, 1024, 2048) if key.part == "gate_up" else (256, 512, 1024)
        found += [GemvPlan(rows, block, 1, warps) for rows in (1, 2, 4, 8) for block in blocks for warps in (4, 8)]
    else:
        expected = key.tokens * key.top_k // key.experts
        sizes = [size for size in (8, 16, 32, 64, 128) if size <= max(16, 4 * expected)][-3:]
        tiles = ((64, 128, 3, 4), (64, 64, 6, 4), (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 4), (128, 128, 3, 8))
        tiles += ((64, 128, 2, 4), (64, 64, 4, 4), (128, 128, 2, 4), (128, 128, 4, 8), (256, 64, 3, 8))
        found += [GroupedPlan(size, *tile) for size in sizes for tile in tiles]
    yield from (plan for plan in found if not expert_problem(key, plan))


def improve(key: ExpertKey, current: ExpertPlan, seconds: Callable[[ExpertPlan], float]) -> ExpertPlan:
    """Return the fastest plan of a key, the current one unless another is faster in each trial.

    seconds: times the layers with a plan; infinite if it does not fit the GPU.
    """
    times = {plan: seconds(plan) for plan in candidates(key, isinstance(current, GemvPlan))}
    for plan in sorted(times, key=lambda plan: times[plan])[:2]:
        if plan != current and all(seconds(plan) < seconds(current) for _ in range(TRIALS)):
            current = plan
    return current


class LayerTimer:
    """Layers of one model in one format, timed with any plans."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, bits: int, gpu: GpuTraits, device: torch.device) -> None:
        scheme = SCHEMES[bits]
        context = triton_build_context(device, torch.bfloat16, gpu, None if scheme is None else Quantization(scheme))
        self.gpu = gpu
        switch = RoutingSwitch.build(device)
        switch.flag.fill_(1)
        size = 3 * moe.experts * moe.width * model.hidden_size * bits / 8
        self.layers = [
            MixtureOfExperts.build(model, moe, index, switch, context) for index in range(int(WEIGHT_BYTES / size) + 1)
        ]
        self.norm = RMSNorm.build(model.hidden_size, model.rms_norm_eps, context)
        for slot in [*self.norm.slots("norm"), *(slot for layer in self.layers for slot in layer.slots(""))]:
            if slot.target.is_floating_point():
                slot.target.fill_(0.01)

    def __call__(self, tokens: int, plans: Plans) -> float:
        """Return the seconds of a layer."""
        # The engine caches its choices by the table's name.
        tiles = replace(self.gpu.tiles, device=f"{self.gpu.name} with {hash(tuple(plans.items()))}", experts=plans)
        for layer in self.layers:
            assert isinstance(layer.experts, TritonExperts | TritonInt4Experts)
            layer.experts.gpu = replace(self.gpu, tiles=tiles)
        x = torch.randn(tokens, len(self.norm.weight), device=self.norm.weight.device, dtype=torch.bfloat16)

        def run() -> None:
            update, residual = x, x
            for layer in self.layers:
                update, residual = layer(update, residual, self.norm)

        return graph_seconds(run) / len(self.layers)


def tune(
    model: ModelConfig, bits: int, tokens: Iterable[int], gpu: GpuTraits, timer: Any, end: float = float("inf")
) -> Plans:
    """Return the best plans of a model's experts, one matmul after the other.

    timer: as `LayerTimer`; end: time of `time.monotonic` at which to stop.
    """
    moe = model.moe
    assert moe is not None, f"{model.architecture} has no experts"
    found: Plans = {}
    for count in tokens:
        x_bits = 8 if bits == 8 and count > GEMV_TOKENS else 16
        # A shared expert of the same width is stored with the others.
        shared = int(moe.shared_width == moe.width)
        sizes = bits, x_bits, model.hidden_size, moe.width, moe.experts + shared, moe.top_k + shared, count
        plans: Plans = {}
        for part in PARTS:
            plans[ExpertKey(part, *sizes)] = choose_expert_plan(ExpertKey(part, *sizes), gpu)
        before = timer(count, plans)
        for kind in (plans, _pair_plans(plans, gpu)) if GEMV_TOKENS < count <= PAIR_TOKENS else (plans,):
            for key in list(kind):
                if time.monotonic() > end:
                    return found

                def seconds(plan: ExpertPlan, key: ExpertKey = key, kind: Plans = kind, count: int = count) -> float:
                    try:
                        return float(timer(count, kind | {key: plan}))
                    except RuntimeError:
                        # Triton's errors of resources: the tile does not fit in shared memory or registers.
                        return float("inf")

                kind[key] = improve(key, kind[key], seconds)
            if kind is plans or all(timer(count, kind) < timer(count, plans) for _ in range(TRIALS)):
                plans = kind
        after = timer(count, plans)
        print(f"{bits} bits, {count} tokens: {before * 1e6:.1f} us, now {after * 1e6:.1f}", flush=True)
        found |= plans
    return found


def _pair_plans(plans: Plans, gpu: GpuTraits) -> Plans:
    """Return plans of the same matmuls that make each pair a GEMV: the rules of a few tokens."""
    keys = [key._replace(x_bits=16) for key in plans]
    return {key: expert_rule(key._replace(tokens=GEMV_TOKENS), gpu) for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[16], choices=sorted(SCHEMES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(EXPERT_BUCKETS), choices=EXPERT_BUCKETS)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    gpu, model = read_gpu_traits(), read_config(model_folder(arguments.model))
    end = time.monotonic() + 60 * arguments.minutes
    plans: Plans = dict(gpu.tiles.experts)
    with torch.inference_mode():
        for bits in arguments.bits:
            assert model.moe is not None, f"{arguments.model} has no experts"
            timer = LayerTimer(model, model.moe, bits, gpu, torch.device("cuda"))
            plans |= tune(model, bits, arguments.tokens, gpu, timer, end)
            del timer
    path = Path(str(packaged(gpu.name)))
    versions = {"torch": torch.__version__, "cuda": str(torch_version.cuda)}
    write_table(path, replace(gpu.tiles, device=gpu.name, experts=plans), versions)
    print(f"{len(plans)} plans of experts in {path}")


if __name__ == "__main__":
    main()
