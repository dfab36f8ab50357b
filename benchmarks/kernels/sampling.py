"""Sampling of one decode step, in microseconds.

The bound is the time to read the logits once.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.suite import READ_GB_PER_S, Options, Record
from benchmarks.measuring.graph_timing import graph_microseconds
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

ROWS, KERNEL_ROWS = (1, 8, 64, 256), (64, 128, 256)
DTYPE = torch.bfloat16
HISTORY = 448
"""Tokens of each row, which penalties read."""
TABLE_WIDTH = 4096
"""Positions of a row in the token table."""
LOGIT_SETS = 4
"""Sets of logits in a graph, so that a step does not find them in the L2 cache."""
REPEATS = 10
"""Launches in the graph in which a kernel is timed alone."""
Parameters = dict[str, float]
CASES: dict[str, tuple[Mode, Parameters, float]] = {
    "greedy": (Mode.GREEDY, {}, 1.0),
    "untruncated": (Mode.UNTRUNCATED, {}, 1.0),
    "full, defaults": (Mode.FULL, {}, 1.0),
    "full, top-p 0.9": (Mode.FULL, {"top_p": 0.9}, 1.0),
    "full, top-p 0.9, peaked": (Mode.FULL, {"top_p": 0.9}, 4.0),
    "full, top-p 0.99, peaked": (Mode.FULL, {"top_p": 0.99}, 3.0),
    "full, top-k 50, top-p 0.9": (Mode.FULL, {"top_p": 0.9, "top_k": 50}, 1.0),
    "full, top-k 20,000": (Mode.FULL, {"top_k": 20_000}, 1.0),
    "full, min-p 0.05": (Mode.FULL, {"min_p": 0.05}, 1.0),
    "full, penalties, top-p 0.9": (Mode.FULL, {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1}, 1.0),
}
"""Mode, sampling parameters, and standard deviation of the logits."""
KERNEL_CASES: dict[str, tuple[Mode, Parameters]] = {
    "greedy": (Mode.GREEDY, {"temperature": 0.0}),
    "T=0.8": (Mode.UNTRUNCATED, {}),
    "T=0.8, top-p 0.95": (Mode.FULL, {"top_p": 0.95}),
    "T=0.8, top-k 50": (Mode.FULL, {"top_k": 50}),
    "T=0.8, top-k 50, top-p 0.95": (Mode.FULL, {"top_k": 50, "top_p": 0.95}),
    "T=0.8, min-p 0.05": (Mode.FULL, {"min_p": 0.05}),
    "T=0.8, top-p 0.95, penalties": (Mode.FULL, {"top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}),
}
"""Mode and sampling parameters of the runs that time each kernel."""
LIKELY = 64
"""Likely tokens of a row with peaked logits."""
SPREADS = {"peaked": 2.0, "flat": 1.0}
"""Standard deviation of the logits; flat ones have no likely tokens, as with random weights."""


def build(batch: int, vocab: int, parameters: Parameters) -> tuple[TritonSampler, Callable[[Tensor], SamplingBatch]]:
    """Build a sampler, and the function that turns logits into its inputs."""
    rows = batch + 1
    ints = torch.zeros(rows, len(INT_COLUMNS), dtype=torch.int64, device="cuda")
    ints[:, INT_COLUMNS.index("prompt_len")], ints[:, INT_COLUMNS.index("seed")] = 256, torch.arange(rows)
    ints[:, INT_COLUMNS.index("top_k")] = int(parameters.get("top_k", 0))
    values = {field.name: field.neutral for field in SAMPLING_FIELDS} | {"temperature": 0.8} | parameters
    tables = SamplingTables(
        tokens=torch.randint(0, vocab, (rows, TABLE_WIDTH), dtype=torch.int32, device="cuda"),
        ints=ints,
        floats=torch.tensor([[values[name] for name in FLOAT_COLUMNS]] * rows, device="cuda"),
        bias=torch.full((2, rows, 512), -1, dtype=torch.int32, device="cuda"),
        suppressed=torch.full((rows, 96), -1, dtype=torch.int32, device="cuda"),
        lengths=torch.ones(rows, dtype=torch.int32, device="cuda"),
    )
    index = torch.arange(1, rows, dtype=torch.int32, device="cuda")
    positions, sampled = index * 0 + HISTORY, index * 0
    sampler = TritonSampler.allocate(tables, vocab, batch, read_gpu_traits().pdl)
    return sampler, lambda logits: SamplingBatch(logits, index, positions, sampled)


def measure(options: Options) -> list[Record]:
    """Time each case at each row count."""
    vocab = options.model.vocab_size
    return table({rows: time_cases(rows, vocab) for rows in options.rows or ROWS})


def measure_kernels(options: Options) -> list[Record]:
    """Time each kernel, with logits like a model's."""
    vocab = options.model.vocab_size
    return table({rows: time_kernels(rows, vocab) for rows in options.rows or KERNEL_ROWS})


def table(figures: dict[int, dict[str, float]]) -> list[Record]:
    """Print a column for each row count and return a record for each cell."""
    print(f"{'us a step':44}" + "".join(f"{f'B={rows}':>9}" for rows in figures))
    for name in next(iter(figures.values())):
        print(f"{name:44}" + "".join(f"{times[name]:9.1f}" for times in figures.values()), flush=True)
    return [{"rows": rows, "case": name, "us": us} for rows, times in figures.items() for name, us in times.items()]


def time_cases(batch: int, vocab: int) -> dict[str, float]:
    """Return the microseconds per step of each case."""
    found = {"bound": batch * vocab * DTYPE.itemsize / READ_GB_PER_S / 1e3}
    for name, (mode, parameters, scale) in CASES.items():
        sampler, batch_of = build(batch, vocab, parameters)
        logits = [(torch.randn(batch, vocab, device="cuda") * scale).to(DTYPE) for _ in range(LOGIT_SETS)]
        found[name] = graph_microseconds([partial(sampler.launch, mode, batch_of(each)) for each in logits])
    scorer = TritonScorer(vocab, batch, 20, torch.device("cuda"))
    chosen = torch.randint(0, vocab, (batch,), device="cuda", dtype=torch.int32)
    for top in (0, 5, 20):
        lines = torch.zeros(batch, 1 + 2 * top, device="cuda", dtype=torch.int32)
        found[f"logprobs, top {top}"] = graph_microseconds(
            [partial(scorer.run, each, chosen, top, lines) for each in logits]
        )
    return found


def logits_like(kind: str, batch: int, vocab: int) -> Tensor:
    """Make logits of a kind of SPREADS."""
    logits = torch.randn(batch, vocab, device="cuda") * SPREADS[kind]
    if kind == "peaked":
        likely = torch.rand(batch, vocab, device="cuda").topk(LIKELY).indices
        heights = 14 - 1.2 * torch.arange(1, LIKELY + 1, device="cuda").log()
        logits.scatter_add_(1, likely, heights.expand(batch, -1))
    return logits.to(DTYPE)


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


def time_kernels(batch: int, vocab: int) -> dict[str, float]:
    """Return the microseconds of each case as a whole and of each of its kernels.

    A kernel that is timed alone reads the results of those before it.
    """
    found = {}
    for kind in SPREADS:
        logits = logits_like(kind, batch, vocab)
        for name, (mode, parameters) in KERNEL_CASES.items():
            sampler, batch_of = build(batch, vocab, parameters)
            inputs = batch_of(logits)
            found[f"{kind}, {name}"] = graph_microseconds([partial(sampler.launch, mode, inputs)] * REPEATS)
            for kernel, launch in kernels_of(mode, sampler, inputs).items():
                found[f"{kind}, {name}: {kernel}"] = graph_microseconds([launch] * REPEATS)
    return found
