"""Steady decode on the GPU, pipelined and blocking, against the memory floor.

    python -m benchmarks.bench_decode --shape benchmarks/shapes/llama-3.2-1b [--batches 1 8 ...] [--save NAME]
    python -m benchmarks.bench_decode --shape benchmarks/shapes/llama-3.1-8b --weights fp8-blocks --prompt 8192
    python -m benchmarks.bench_decode --shape benchmarks/shapes/llama-3.2-1b --max-len 4096 131072 [--batches 1 8 64]
    python -m benchmarks.bench_decode --shape benchmarks/shapes/qwen3-30b-a3b --routing uniform

Prompts of 256 random tokens, random weights, greedy; milliseconds per step while the context grows from 320 to 576.
Reported with every step: the floor (weights and KV read once at the bandwidth measured in the same run); the linear
layers using cuBLAS in a CUDA graph; the GPU time of a step (F: its graphs replayed back to back at the middle of the
range); the CPU time of a tick (C, with a test double for the mailbox); and the GPU's idle time: the step minus F, and
by CUDA events only the gap between two steps. For quantized weights (--weights, --quantize), the time to read them once
replaces the linear layers. --prompt also measures a single prompt from submission to its first token. --max-len allows
longer contexts, which should not slow these steps down: with two values, the steps of two engines are timed
alternately, greedy and with penalties, and the slowdown of the second is reported.

"table" is what the scheduler expects of a step: its table of steps, as timed at the start, and the context.

Of a mixture of experts, the floor reads the experts that a step routes to, whose mean number per layer is printed.
--routing uniform chooses them pseudorandomly: the router of random weights prefers some experts.
"""

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch.nn import functional

from benchmarks.measuring import two_lengths
from benchmarks.measuring.expert_counts import counting_experts
from benchmarks.measuring.graph_timing import graph_seconds, new_event
from benchmarks.measuring.results import save
from benchmarks.measuring.weight_formats import FORMATS, write_shape
from tandem.engine_core.engine import Engine
from tandem.engine_core.kernels.delta_rule.state import RING
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.pipeline import PipelineState
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.scheduler.step_costs import StepWork
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.stats import STAGES, new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.mailbox import FakeMailbox

PROMPT, FIRST, LAST = 256, 64, 320
ALLOWANCES_MS = {"llama-3.2-1b": 0.2}
ALLOWANCE_MS = 0.4
"""Milliseconds allowed for norms, RoPE, launches and sampling, in addition to linears and KV."""
CLIENT, EPOCH = b"bench", 1
GREEDY = SamplingParams(LAST + 40, temperature=0.0, ignore_eos=True)
SAMPLED_ROWS = (64, 256)
"""Row counts that are also measured with temperature and top-p."""
SAMPLED = SamplingParams(LAST + 40, temperature=0.8, top_p=0.95, ignore_eos=True, seed=1)


@dataclass
class Figures:
    """Figures of a batch size in a mode; times are in milliseconds per step."""

    rows: int
    mode: str
    step: float
    gpu: float
    cpu: float
    over_slower: float
    """Step time relative to the slower of CPU and GPU: step / max(C, F)."""
    gpu_idle_percent: float
    """Idle share of the step, by F; copies and host updates, which the replay lacks, count as idle."""
    gap_percent: float
    """Idle share between the end of a step and the first work of the next, by CUDA events."""
    tokens_per_second: float
    floor: float
    experts: float | None
    """Distinct experts of a layer in a step; None: the model has none."""
    expected: float
    """The scheduler's expectation before any step was run: its table of steps, and the context."""
    linears: float
    accepted: float
    """Lower bound of a step: linears + KV bytes / bandwidth + an allowance for the rest."""
    gain: float | None
    """Gain of pipelining: blocking / pipelined time - 1."""
    gain_ideal: float
    """Maximum gain with perfect overlap: (C + F) / max(C, F) - 1."""
    stages_us: dict[str, float]


class Bench:
    """Engine and its mailbox. The pipeline's depth changes between runs."""

    def __init__(
        self,
        shape: Path,
        max_rows: int,
        weights: str = "16-bit",
        quantize: str = "off",
        prompt: int = 0,
        max_len: int | None = None,
        exclude: Sequence[str] = (),
        routing: str = "model",
    ) -> None:
        self.mailbox = FakeMailbox()
        self.is_quantized = weights != "16-bit" or quantize != "off"
        with tempfile.TemporaryDirectory() as directory:
            options = EngineOptions(
                model=str(write_shape(shape, weights, Path(directory), exclude)),
                load_format="dummy",
                device="cuda",
                dtype="bfloat16",
                quantize="fp8" if quantize == "fp8" else "off",
                max_rows=max_rows,
                max_len=max_len or max(1024, prompt + 16),
                kv_tokens=max(max_rows * 768, 2 * prompt + 32, max_len or 0),
            )
            started = time.perf_counter()
            self.engine = build_engine(options, self.mailbox, Status(EPOCH, new_stats()))
            self.ready_seconds = time.perf_counter() - started
        switch = self.runtime.model.routing
        if routing == "uniform":
            assert switch is not None, f"{shape.name} has no experts to route to"
            switch.flag.fill_(1)
        self.shape = shape.name
        self.model = read_config(shape)
        self.requests = 0
        self.mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "bench")))

    @property
    def runtime(self) -> TorchRuntime:
        runtime = self.engine.runtime
        assert isinstance(runtime, TorchRuntime)
        return runtime

    def with_depth(self, depth: int) -> Engine:
        engine = self.engine
        engine.pipeline = PipelineState(depth)
        return engine

    def run(self, rows: int, depth: int, params: SamplingParams) -> dict[str, float]:
        """Fill the batch, and measure while the context grows from 320 to 576."""
        engine = self.with_depth(depth)
        rng = random.Random(rows)
        first = self.requests + 1
        for _ in range(rows):
            self.requests += 1
            prompt = [rng.randrange(self.model.vocab_size) for _ in range(PROMPT)]
            self.mailbox.inbox.append((CLIENT, Submit(self.requests, pack_ids(prompt), params)))
        newest = (CLIENT, self.requests)
        while len(self.mailbox.received[newest]) < FIRST:
            engine.tick()
        times = engine.runtime.device_times()
        busy, idle, timed = times.busy, times.idle, times.steps
        stages = dict(engine.stats.stage_seconds)
        steps, started = engine.stats.steps_committed, time.perf_counter()
        while len(self.mailbox.received[newest]) < LAST:
            engine.tick()
        seconds = time.perf_counter() - started
        steps = engine.stats.steps_committed - steps
        figures = {f"stage {name}": (engine.stats.stage_seconds[name] - stages[name]) / steps for name in STAGES}
        timed = max(1, times.steps - timed)
        figures |= {"step": seconds / steps, "gpu": (times.busy - busy) / timed, "idle": (times.idle - idle) / timed}
        while any((CLIENT, number) not in self.mailbox.outcomes for number in range(first, self.requests + 1)):
            engine.tick()
        for number in range(first, self.requests + 1):
            del self.mailbox.received[CLIENT, number]
        return figures

    def count_experts(self, rows: int, steps: int = 3) -> float | None:
        """Return the mean number of distinct experts of a layer in a decode step, None without experts."""
        if self.model.moe is None:
            return None
        engine, runtime, rng = self.with_depth(1), self.runtime, random.Random(rows)
        first = self.requests + 1
        for _ in range(rows):
            self.requests += 1
            prompt = [rng.randrange(self.model.vocab_size) for _ in range(PROMPT)]
            params = SamplingParams(LAST, temperature=0.0, ignore_eos=True)
            self.mailbox.inbox.append((CLIENT, Submit(self.requests, pack_ids(prompt), params)))
        keys = [(CLIENT, number) for number in range(first, self.requests + 1)]
        while min(len(self.mailbox.received[key]) for key in keys) < FIRST:
            engine.tick()
        graphs, runtime.graphs = runtime.graphs, None
        with counting_experts(runtime.model) as counts:
            for _ in range(steps):
                engine.tick()
        runtime.graphs = graphs
        while any(key not in self.mailbox.outcomes for key in keys):
            engine.tick()
        for key in keys:
            del self.mailbox.received[key]
        return counts.mean

    def prompt_seconds(self, length: int, repeats: int = 5) -> float:
        """Return the median seconds from a single prompt to its only token."""
        engine, found = self.with_depth(2), []
        rng = random.Random(length)
        for _ in range(repeats):
            self.requests += 1
            prompt = [rng.randrange(self.model.vocab_size) for _ in range(length)]
            params = SamplingParams(1, temperature=0.0, ignore_eos=True)
            submit = Submit(self.requests, pack_ids(prompt), params)
            started = time.perf_counter()
            self.mailbox.inbox.append((CLIENT, submit))
            while (CLIENT, self.requests) not in self.mailbox.outcomes:
                engine.tick()
            found.append(time.perf_counter() - started)
        return statistics.median(found)


def read_bandwidth() -> float:
    """Measure the read bandwidth in bytes/s, using `torch.sum` over 8 GB."""
    data = torch.ones(2 * 2**30, dtype=torch.float32, device="cuda")
    return data.nbytes / graph_seconds(lambda: data.sum())


def linear_seconds(model: Any, rows: int) -> float:
    """Time all linear layers of the model and the head using cuBLAS, in seconds, on random inputs."""
    weights = [layer.attention.qkv.weight for layer in model.layers]
    weights += [layer.attention.output.weight for layer in model.layers]
    weights += [layer.mlp.gate_up.weight for layer in model.layers]
    weights += [layer.mlp.down.weight for layer in model.layers] + [model.head.weight]
    inputs = {k: torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for k in {w.shape[1] for w in weights}}

    def work() -> None:
        for weight in weights:
            functional.linear(inputs[weight.shape[1]], weight)

    return graph_seconds(work)


def replayed_seconds(runtime: TorchRuntime, rows: int, mode: Mode, repeats: int = 60) -> float:
    """Time a step's graphs at the middle context of a run, in seconds.

    They are replayed often enough to keep the device busy, after a run, with the pages and parameters it left.
    """
    assert runtime.graphs is not None
    bucket = next(size for size in runtime.graphs.rows if size >= rows)
    slot, graphs = runtime.slots[0], runtime.graphs.decode[0][bucket]
    slot.device_inputs[: 2 * bucket] = 0
    slot.device_inputs[:rows] = torch.arange(1, rows + 1, dtype=torch.int32)
    # Positions differ, as recurrent layers fold the ring of a row at multiples of its size.
    slot.device_inputs[bucket : bucket + rows] = (
        PROMPT + (FIRST + LAST) // 2 + torch.arange(8, rows + 8, dtype=torch.int32) % RING
    )
    start, end = new_event(), new_event()
    for number in range(repeats + 5):
        if number == 5:
            start.record()
        graphs.forward.replay()
        graphs.sampling[mode].replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def measure(bench: Bench, batches: list[int], bandwidth: float) -> list[Figures]:
    found: list[Figures] = []
    config = bench.model
    slots = bench.runtime.model.weight_slots()
    expert_bytes = sum({slot.parameter.data_ptr(): slot.parameter.nbytes for slot in slots if is_expert(slot)}.values())
    stacks = {slot.parameter.data_ptr() for slot in slots if is_expert(slot)}
    slots = [slot for slot in slots if slot.parameter.data_ptr() not in stacks]
    # A shared expert that is stored with the others is read in each step.
    stacked = int(config.moe is not None and config.moe.shared_width > 0 and not any(map(is_shared_expert, slots)))
    projections = {slot.parameter.data_ptr(): slot.parameter.nbytes for slot in slots if "_proj" in slot.name}
    weights = sum(projections.values()) + sum(slot.target.nbytes for slot in slots if "_proj" not in slot.name)
    # A step reads one row of the embedding per token. A tied one is the head, counted once.
    weights -= config.vocab_size * config.hidden_size * 2
    kv_token = 2 * len(config.attention_layers) * config.kv_heads * config.head_dim * 2
    # Of recurrent layers: the base, which every 16th step writes too.
    state = sum(layer.base[0].nbytes for layer in bench.runtime.kv.recurrent) * (1 + 1 / RING)
    context = PROMPT + (FIRST + LAST) / 2
    allowance = ALLOWANCES_MS.get(bench.shape, ALLOWANCE_MS)
    # Measured steps correct the costs.
    costs = bench.engine.scheduler.planner.costs
    expected = {rows: costs.milliseconds(StepWork(rows, int(rows * context))) for rows in batches}
    for rows in batches:
        kv_read = rows * (context * kv_token + state) / bandwidth
        experts = bench.count_experts(rows)
        read = weights
        if config.moe is not None and experts is not None:
            read += expert_bytes * (experts + stacked) / (config.moe.experts + stacked)
        floor = read / bandwidth + kv_read
        plain = not bench.is_quantized and config.moe is None
        linears = linear_seconds(bench.runtime.model, rows) if plain else read / bandwidth
        bounds = Bounds(floor * 1e3, linears * 1e3, (linears + kv_read) * 1e3 + allowance, expected[rows], experts)
        ways = [("blocking", 1, GREEDY), ("pipelined", 2, GREEDY)]
        ways += [("sampled", 2, SAMPLED)] if rows in SAMPLED_ROWS else []
        blocking = None
        for mode, depth, params in ways:
            measured = bench.run(rows, depth, params)
            measured["alone"] = replayed_seconds(bench.runtime, rows, Mode.GREEDY if params is GREEDY else Mode.FULL)
            found.append(figures_of(rows, mode, measured, bounds, blocking if mode == "pipelined" else None))
            blocking = found[-1].step
            print(line(found[-1]), flush=True)
    return found


@dataclass
class Bounds:
    """Lower bounds of a step in milliseconds."""

    floor: float
    linears: float
    accepted: float
    expected: float = 0.0
    experts: float | None = None


def is_expert(slot: WeightSlot) -> bool:
    """Return whether a slot is of an expert's weights or scales."""
    return ".experts." in slot.name


def is_shared_expert(slot: WeightSlot) -> bool:
    """Return whether a slot is of the weights or scales of a shared expert."""
    return ".shared_expert." in slot.name


def figures_of(rows: int, mode: str, f: dict[str, float], bounds: Bounds, blocking: float | None) -> Figures:
    """Convert the measurements of a run to figures.

    blocking: milliseconds per step with one step in flight, if known.
    """
    cpu, gpu = sum(f[f"stage {name}"] for name in STAGES if name != "collect"), f["alone"]
    return Figures(
        rows=rows,
        mode=mode,
        step=f["step"] * 1e3,
        gpu=gpu * 1e3,
        cpu=cpu * 1e3,
        over_slower=f["step"] / max(cpu, gpu),
        gpu_idle_percent=100 * max(0.0, 1 - gpu / f["step"]),
        gap_percent=100 * f["idle"] / (f["gpu"] + f["idle"]),
        tokens_per_second=rows / f["step"],
        floor=bounds.floor,
        experts=bounds.experts,
        expected=bounds.expected,
        linears=bounds.linears,
        accepted=bounds.accepted,
        gain=blocking / (f["step"] * 1e3) - 1 if blocking is not None else None,
        gain_ideal=(cpu + gpu) / max(cpu, gpu) - 1,
        stages_us={name: f[f"stage {name}"] * 1e6 for name in STAGES},
    )


COLUMNS = ("rows", 5), ("mode", 10), ("step ms", 8), ("F ms", 7), ("C ms", 7), ("idle %", 7), ("gap %", 7), ("tok/s", 9)
LIMITS = (
    ("table", 7),
    ("experts", 7),
    ("floor", 6),
    ("x floor", 8),
    ("cuBLAS", 7),
    ("accepted", 9),
    ("gain %", 7),
    ("ideal %", 8),
    ("x max", 7),
)
HEAD = " ".join(f"{name:>{width}}" for name, width in (*COLUMNS, *LIMITS))


def line(f: Figures) -> str:
    gain = "" if f.gain is None else f"{100 * f.gain:.1f}"
    times = f"{f.step:>8.3f} {f.gpu:>7.3f} {f.cpu:>7.3f} {f.gpu_idle_percent:>7.2f} {f.gap_percent:>7.2f}"
    experts = "" if f.experts is None else f"{f.experts:.1f}"
    limits = f"{f.expected:>7.3f} {experts:>7} {f.floor:>6.3f} {f.step / f.floor:>8.2f} {f.linears:>7.3f}"
    limits += f" {f.accepted:>9.3f}"
    overlap = f"{gain:>7} {100 * f.gain_ideal:>8.1f} {f.over_slower:>7.3f}"
    return f"{f.rows:>5} {f.mode:>10} {times} {f.tokens_per_second:>9.0f} {limits} {overlap}"


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="directory with a config.json")
    parser.add_argument(
        "--batches", type=int, nargs="+", help="rows (default 1 8 32 64 128 256; 1 8 64 with two values of --max-len)"
    )
    parser.add_argument("--weights", default="16-bit", choices=FORMATS, help="format of the random weights")
    parser.add_argument(
        "--exclude", nargs="*", default=[], metavar="REGEX", help="linear layers that stay in 16 bits, by their names"
    )
    parser.add_argument("--quantize", default="off", choices=("off", "fp8"), help="as of `tandem serve`")
    parser.add_argument("--prompt", type=int, default=0, help="length of a lone prompt to measure too")
    parser.add_argument(
        "--routing",
        default="model",
        choices=("model", "uniform"),
        help="experts of tokens: of the model's random router, or pseudorandom ones",
    )
    parser.add_argument(
        "--max-len",
        type=int,
        nargs="+",
        metavar="N",
        help="as of `tandem serve` (default 1024, or what --prompt needs); two to compare",
    )
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser


def compare_lengths(arguments: argparse.Namespace) -> None:
    """Time the steps of two engines alternately, and print the slowdown of the second."""
    batches, lengths = arguments.batches or [1, 8, 64], arguments.max_len
    if min(lengths) < two_lengths.MIN_LEN:
        raise SystemExit(f"--max-len {min(lengths)}: the rows to be timed need {two_lengths.MIN_LEN}")
    with tempfile.TemporaryDirectory() as directory:
        folder = write_shape(arguments.shape, arguments.weights, Path(directory))
        engines = two_lengths.build(folder, lengths, max(batches), arguments.quantize)
    found = []
    for kind in two_lengths.KINDS:
        for rows in batches:
            found.append(two_lengths.compare(engines, rows, kind))
            print(two_lengths.line(arguments.max_len, found[-1]), flush=True)
    if arguments.save:
        config = {"shape": arguments.shape.name, "batches": batches, "max_len": arguments.max_len}
        config |= {"weights": arguments.weights, "quantize": arguments.quantize, "gpu": torch.cuda.get_device_name()}
        print(save(arguments.save, config, {"steps": [structs.asdict(loss) for loss in found]}))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = arguments_parser()
    arguments = parser.parse_args()
    lengths = arguments.max_len or [None]
    if len(lengths) > 2:
        parser.error(f"--max-len takes one length or two to compare, not {len(lengths)}")
    if len(lengths) == 2:
        compare_lengths(arguments)
        return
    arguments.batches = arguments.batches or [1, 8, 32, 64, 128, 256]
    bandwidth = read_bandwidth()
    weights, quantize, prompt = arguments.weights, arguments.quantize, arguments.prompt
    batches = arguments.batches
    bench = Bench(
        arguments.shape, max(batches), weights, quantize, prompt, lengths[0], arguments.exclude, arguments.routing
    )
    print(
        f"{arguments.shape.name} --weights {weights} --quantize {quantize}: read bandwidth {bandwidth / 1e9:.0f} GB/s, "
        f"ready in {bench.ready_seconds:.1f} s",
        flush=True,
    )
    prompt_ms = bench.prompt_seconds(prompt) * 1e3 if prompt else None
    if prompt_ms is not None:
        print(f"prompt of {prompt}: {prompt_ms:.1f} ms", flush=True)
    print(HEAD, flush=True)
    figures = measure(bench, arguments.batches, bandwidth)
    if arguments.save:
        config = {"shape": arguments.shape.name, "batches": arguments.batches, "prompt": PROMPT, "context": [320, 576]}
        config |= {
            "max_len": lengths[0],
            "weights": weights,
            "quantize": quantize,
            "exclude": arguments.exclude,
            "routing": arguments.routing,
            "lone_prompt": prompt,
            "lone_prompt_ms": prompt_ms,
        }
        result = {"bandwidth": bandwidth, "ready_seconds": bench.ready_seconds, "steps": [asdict(f) for f in figures]}
        print(save(arguments.save, config | {"gpu": torch.cuda.get_device_name()}, result))


if __name__ == "__main__":
    main()
