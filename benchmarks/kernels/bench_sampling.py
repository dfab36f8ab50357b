"""Sampling time of one decode step on a GPU, in CUDA graphs.

The time that reading the logits once would take is the bound.

python -m benchmarks.kernels.bench_sampling [--vocab 128256] [--batches 1,8,64,256] [--history 448]
python -m benchmarks.kernels.bench_sampling --kernels  # each kernel alone, with logits like those of a model
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.measuring.results import save
from tandem.engine_core.kernels.sampling.greedy import sample_greedy
from tandem.engine_core.kernels.sampling.gumbel_draw import draw, row_best
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.logprobs import TritonScorer
from tandem.engine_core.kernels.sampling.penalties import adjust, mark
from tandem.engine_core.kernels.sampling.prefix_mass import prefix_mass
from tandem.engine_core.kernels.sampling.rejection_resample import rejection_resample
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.sampling.triton_sampler import TritonSampler
from tandem.protocol.params import SAMPLING_FIELDS

BANDWIDTH = 4.385e12
"""Measured read bandwidth of an H200, in bytes/s."""
REPEATS = 10
"""Launches in the graph in which a kernel is timed alone."""
LEAST_LEN = 4096
"""Positions of a row in the token table, unless the history is longer."""
Parameters = dict[str, float]
CASES: dict[str, tuple[Mode, Parameters, float]] = {
    "greedy": (Mode.GREEDY, {}, 1.0),
    "untruncated": (Mode.UNTRUNCATED, {}, 1.0),
    "full, nothing asked": (Mode.FULL, {}, 1.0),
    "full, top-p 0.9": (Mode.FULL, {"top_p": 0.9}, 1.0),
    "full, top-p 0.9, peaked": (Mode.FULL, {"top_p": 0.9}, 4.0),
    "full, top-p 0.99, peaked": (Mode.FULL, {"top_p": 0.99}, 3.0),
    "full, top-k 50, top-p 0.9": (Mode.FULL, {"top_p": 0.9, "top_k": 50}, 1.0),
    "full, top-k 20,000": (Mode.FULL, {"top_k": 20_000}, 1.0),
    "full, min-p 0.05": (Mode.FULL, {"min_p": 0.05}, 1.0),
    "full, penalties, top-p 0.9": (Mode.FULL, {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1}, 1.0),
}
"""Mode, parameters of all rows, and the standard deviation of the logits."""
KERNEL_CASES: dict[str, tuple[Mode, Parameters]] = {
    "greedy": (Mode.GREEDY, {"temperature": 0.0}),
    "T=0.8": (Mode.UNTRUNCATED, {}),
    "T=0.8, top-p 0.95": (Mode.FULL, {"top_p": 0.95}),
    "T=0.8, top-k 50": (Mode.FULL, {"top_k": 50}),
    "T=0.8, top-k 50, top-p 0.95": (Mode.FULL, {"top_k": 50, "top_p": 0.95}),
    "T=0.8, min-p 0.05": (Mode.FULL, {"min_p": 0.05}),
    "T=0.8, top-p 0.95, penalties": (Mode.FULL, {"top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}),
}
"""Mode and parameters of all rows where kernels are timed alone."""
LIKELY = 64
"""Tokens of a row that stand out of its logits where these are like a model's."""
SPREADS = {"peaked": 2.0, "flat": 1.0}
"""Standard deviation of the logits; in flat ones no token stands out, as with random weights."""


def build(
    batch: int, vocab: int, history: int, parameters: Parameters
) -> tuple[TritonSampler, Callable[[Tensor], SamplingBatch]]:
    """Make a sampler, and the function that makes a batch of logits.

    The sampler has a row for each row of the batch. history: tokens of each row.
    """
    rows = batch + 1
    ints = torch.zeros(rows, len(INT_COLUMNS), dtype=torch.int64, device="cuda")
    ints[:, INT_COLUMNS.index("prompt_len")], ints[:, INT_COLUMNS.index("seed")] = 256, torch.arange(rows)
    ints[:, INT_COLUMNS.index("top_k")] = int(parameters.get("top_k", 0))
    values = {field.name: field.neutral for field in SAMPLING_FIELDS} | {"temperature": 0.8} | parameters
    tables = SamplingTables(
        tokens=torch.randint(0, vocab, (rows, max(LEAST_LEN, history + 2)), dtype=torch.int32, device="cuda"),
        ints=ints,
        floats=torch.tensor([[values[name] for name in FLOAT_COLUMNS]] * rows, device="cuda"),
        bias=torch.full((2, rows, 512), -1, dtype=torch.int32, device="cuda"),
        suppressed=torch.full((rows, 96), -1, dtype=torch.int32, device="cuda"),
        lengths=torch.ones(rows, dtype=torch.int32, device="cuda"),
    )
    index = torch.arange(1, rows, dtype=torch.int32, device="cuda")
    positions, sampled = index * 0 + history, index * 0
    sampler = TritonSampler.allocate(tables, vocab, batch, read_gpu_traits().pdl)
    return sampler, lambda logits: SamplingBatch(logits, index, positions, sampled)


def microseconds(call: Callable[[int], object], sets: int) -> float:
    """Time one call in microseconds, in a graph with one call per set of inputs."""

    def call_all() -> None:
        for index in range(sets):
            call(index)

    return graph_seconds(call_all, replays=30) * 1e6 / sets


def measure(batch: int, vocab: int, history: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the time of each case, in microseconds per step.

    The logits rotate among several sets, as a step finds them in the L2 cache.
    """
    sets = 4
    found = {"bound": batch * vocab * dtype.itemsize / BANDWIDTH * 1e6}
    for name, (mode, parameters, scale) in CASES.items():
        sampler, batch_of = build(batch, vocab, history, parameters)
        logits = [(torch.randn(batch, vocab, device="cuda") * scale).to(dtype) for _ in range(sets)]
        batches = [batch_of(each) for each in logits]
        found[name] = microseconds(partial(launch, sampler, mode, batches), sets)
    kernels = TritonScorer(vocab, batch, 20, torch.device("cuda"))
    chosen = torch.randint(0, vocab, (batch,), device="cuda", dtype=torch.int32)
    for top in (0, 5, 20):
        lines = torch.zeros(batch, 1 + 2 * top, device="cuda", dtype=torch.int32)
        call = partial(score, kernels, logits, chosen, top, lines)
        found[f"logprobs, top {top}"] = microseconds(call, sets)
    return found


def logits_like(kind: str, batch: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Make logits of a kind of SPREADS."""
    logits = torch.randn(batch, vocab, device="cuda") * SPREADS[kind]
    if kind == "peaked":
        likely = torch.rand(batch, vocab, device="cuda").topk(LIKELY).indices
        heights = 14 - 1.2 * torch.arange(1, LIKELY + 1, device="cuda").log()
        logits.scatter_add_(1, likely, heights.expand(batch, -1))
    return logits.to(dtype)


def kernels_of(mode: Mode, sampler: TritonSampler, batch: SamplingBatch) -> dict[str, Callable[[], None]]:
    """Return the kernels of a mode, in the order of their launches."""
    tables, scratch = sampler.tables, sampler.scratch
    if mode is Mode.GREEDY:
        return {"greedy": lambda: sample_greedy(batch, tables, scratch)}
    if mode is Mode.UNTRUNCATED:
        return {
            "row_best": lambda: row_best(batch, tables, scratch),
            "draw": lambda: draw(batch, tables, scratch, full=False),
        }
    return {
        "mark": lambda: mark(batch, tables, scratch),
        "adjust": lambda: adjust(batch, tables, scratch),
        "draw": lambda: draw(batch, tables, scratch, full=True),
        "prefix_mass": lambda: prefix_mass(batch, tables, scratch),
        "rejection_resample": lambda: rejection_resample(batch, tables, scratch),
    }


def measure_kernels(batch: int, vocab: int, history: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the time of each kernel and of each case as a whole, in microseconds.

    A kernel alone finds the results of those before it, and runs several times in a graph.
    """
    found = {}
    for kind in SPREADS:
        logits = logits_like(kind, batch, vocab, dtype)
        for name, (mode, parameters) in KERNEL_CASES.items():
            sampler, batch_of = build(batch, vocab, history, parameters)
            given = batch_of(logits)
            found[f"{kind}, {name}"] = microseconds(partial(launch, sampler, mode, [given] * REPEATS), REPEATS)
            for kernel, call in kernels_of(mode, sampler, given).items():
                found[f"{kind}, {name}: {kernel}"] = microseconds(partial(repeated, call), REPEATS)
    return found


def repeated(call: Callable[[], None], _: int) -> None:
    """Call a kernel once, whatever the number of the repetition."""
    call()


def launch(sampler: TritonSampler, mode: Mode, batches: list[SamplingBatch], index: int) -> None:
    """Sample from one set of logits."""
    sampler.launch(mode, batches[index])


def score(kernels: TritonScorer, logits: list[Tensor], chosen: Tensor, top: int, lines: Tensor, index: int) -> None:
    """Compute the log-probabilities of one set of logits."""
    kernels.run(logits[index], chosen, top, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batches", help="rows of a step, separated by commas")
    parser.add_argument("--history", type=int, default=448, help="tokens of each row, which penalties read")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", action="store_true", help="time each kernel alone, at 64, 128 and 256 rows")
    options = parser.parse_args()
    batches = [
        int(value) for value in (options.batches or ("64,128,256" if options.kernels else "1,8,64,256")).split(",")
    ]
    measured = measure_kernels if options.kernels else measure
    figures = {
        batch: measured(batch, options.vocab, options.history, getattr(torch, options.dtype)) for batch in batches
    }
    save(
        "bench_sampling_kernels" if options.kernels else "bench_sampling",
        vars(options) | {"gpu": torch.cuda.get_device_name()},
        figures,
    )
    print(f"{'us a step':44}" + "".join(f"{f'B={batch}':>9}" for batch in batches))
    for name in figures[batches[0]]:
        print(f"{name:44}" + "".join(f"{figures[batch][name]:9.1f}" for batch in batches))


if __name__ == "__main__":
    main()
