"""Steps that verify drafts on a GPU, and texts generated with them, against plain steps of the same engine.

    python -m benchmarks.bench_speculation --shape benchmarks/shapes/llama-3.1-8b [--rows 1 8 32 ...] [--save NAME]

Random weights, 16 bits. Four tables:

steps: milliseconds of a plain step, its CUDA graphs replayed back to back, and those of verify steps over it, by rows
and drafts. Contexts have 448 tokens that repeat, so that each row has all of its drafts.

texts: tokens per second of requests with drafts over those of the same requests without (`speculation: false`), tokens
per step of a row, and the GPU's idle share. The output is forced (`--teacher-tokens`): `editing` is the source of
Python's textwrap with two names changed, after the source itself; `quoting` is four of its methods in reverse order,
each after a sentence that the prompt does not have. Both are tokenized by the tokenizer of the default model.
`constant` is one token again and again. `random` is sampled from random weights: nothing repeats, and drafts only cost
time.

acceptance: likewise, with drafts that are accepted with a given probability (`--synthetic-acceptance`), whatever the
model says, and a fixed number of them.

start: what the graphs of verify steps add to the start, from the engine's log.
"""

import argparse
import inspect
import json
import logging
import random
import re
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, to_builtins

from benchmarks.measuring.graph_timing import new_event
from benchmarks.measuring.results import save
from tandem.engine_core.graph_sizes import DRAFT_SIZES
from tandem.engine_core.kernels.delta_rule.state import RING
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS
from tandem.engine_core.runtime.forced_sampler import ForcedSampler
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.startup.engine import DEFAULT_MODEL, build_engine
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.mailbox import FakeMailbox

CLIENT, EPOCH = b"bench", 1
CONTEXT, PERIOD, MAX_LEN = 448, 50, 4096
PROMPT, OUTPUT = 2500, 1000
"""Maximum tokens of the prompt and of the output of a text."""
RANDOM_PROMPT, RANDOM_OUTPUT = 64, 384
ROUNDS = 5


class Step(Struct):
    """Plain and verify steps of a number of rows."""

    rows: int
    plain_ms: float
    over_plain: dict[str, float]
    """Time of a verify step over that of a plain one, by drafts."""


class Run(Struct):
    """Requests with drafts, against the same without."""

    text: str
    rows: int
    over_plain: float
    tokens_per_step: float
    """Tokens of a row in a step with drafts in flight, prompts left out."""
    tokens_per_second: float
    plain_tokens_per_second: float
    idle_percent: float
    """Idle share of the GPU with drafts, by CUDA events."""


class Text(Struct):
    """A prompt, and the output that is forced: None to sample it."""

    name: str
    prompt: list[int]
    output: list[int] | None


def texts(encode: Callable[[str], list[int]]) -> list[Text]:
    """Return the texts that repeat a prompt. encode: tokenizes."""
    whole = inspect.getsource(textwrap)
    source = whole[whole.index("    def _munge_whitespace") :]
    prompt = encode(source)[:PROMPT]
    edited = re.sub(r"\bwidth\b", "columns", re.sub(r"\bself\b", "this", source))
    methods = re.findall(r"    def \w+\(.*?(?=\n    def |\nclass |\n# --|\Z)", source, re.DOTALL)[:4]
    notes = ("Here is what the class does", "This part comes earlier", "Before it you find", "It all begins with this")
    quoted = "".join([f"{notes[n % len(notes)]}, number {n}:\n\n{body}\n\n" for n, body in enumerate(methods[::-1])])
    return [
        Text("editing", prompt, encode(edited)[:OUTPUT]),
        Text("quoting", prompt, encode(quoted)[:OUTPUT]),
    ]


def tokenizer() -> Callable[[str], list[int]]:
    """Return the tokenizer of the default model, without special tokens."""
    import tokenizers

    found = tokenizers.Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    return lambda text: found.encode(text, add_special_tokens=False).ids


class Bench:
    """An engine that drafts, and its mailbox."""

    def __init__(self, options: EngineOptions) -> None:
        self.mailbox = FakeMailbox()
        self.log: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tandem").addHandler(handler)
        logging.getLogger("tandem").setLevel(logging.INFO)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([], file)
            file.flush()
            given = {"developer": "on", "teacher_tokens": file.name, "synthetic_acceptance": 0.0}
            given["speculate"] = "ngram" if options.draft_model is None else options.speculate
            fields = {name: getattr(options, name) for name in options.__struct_fields__} | given
            began = time.perf_counter()
            self.engine = build_engine(EngineOptions(**fields), self.mailbox, Status(EPOCH, new_stats()))
        self.start_seconds = time.perf_counter() - began
        self.requests = 0
        self.mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "bench")))

    @property
    def runtime(self) -> TorchRuntime:
        runtime = self.engine.runtime
        assert isinstance(runtime, TorchRuntime)
        return runtime

    @property
    def sampler(self) -> ForcedSampler:
        sampler = self.runtime.sampler
        assert isinstance(sampler, ForcedSampler)
        return sampler

    @property
    def growth(self) -> str:
        """Log line of the graphs of verify steps."""
        return next((line for line in self.log if line.startswith("steps that verify drafts")), "not logged")

    def force(self, output: Sequence[int] | None, acceptance: float = 0.0) -> None:
        """Have every request generate an output, or drafts be accepted with a probability."""
        self.sampler.text.fill_(-1)
        if output is not None:
            self.sampler.text[: len(output)] = torch.tensor(output, dtype=torch.int32, device=self.sampler.text.device)
        self.sampler.acceptance.fill_(acceptance)

    def fix(self, drafts: int | None) -> None:
        """Have every step verify a number of drafts; None: it follows what is right."""
        planner = self.engine.scheduler.planner
        old, sizes = planner.drafts, DRAFT_SIZES if drafts is None else (drafts,)
        given = old.row_counts, old.max_positions, old.has_model, old.costs
        planner.drafts = DraftPolicy(sizes, drafts, *given)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, speculation: bool, first_seed: int = 0
    ) -> dict[str, float]:
        """Run requests of equal lengths at once, and return figures of the steps in which all of them have tokens.

        With drafts some end before others: these are run to their ends too, but a step of fewer rows is another one.
        first_seed: seed of the first request; those of the others follow. Requests of equal seeds accept equal drafts.
        Raises RuntimeError if the engine refuses a request.
        """
        engine, keys = self.engine, []
        for number, prompt in enumerate(prompts):
            self.requests += 1
            keys.append((CLIENT, self.requests))
            params = SamplingParams(tokens, temperature=1.0, seed=first_seed + number, ignore_eos=True)
            submit = Submit(self.requests, pack_ids(prompt), params, speculation=speculation)
            self.mailbox.inbox.append((CLIENT, submit))
        received, outcomes = self.mailbox.received, self.mailbox.outcomes
        while min(len(received[key]) for key in keys) < 2:
            engine.tick()
            if ended := [outcomes[key][0] for key in keys if key in outcomes and len(received[key]) < 2]:
                raise RuntimeError(f"a request has ended before its second token: {ended[0]}")
        times = engine.runtime.device_times()
        busy, idle, steps = times.busy, times.idle, engine.stats.steps_committed
        count, began = sum(len(received[key]) for key in keys), time.perf_counter()
        while not any(key in outcomes for key in keys):
            engine.tick()
        seconds, steps = time.perf_counter() - began, engine.stats.steps_committed - steps
        found = sum(len(received[key]) for key in keys) - count
        times = engine.runtime.device_times()
        idle, busy = times.idle - idle, times.busy - busy
        while not all(key in outcomes for key in keys):
            engine.tick()
        return {
            "per second": found / seconds,
            "per step": found / steps / len(prompts),
            "idle": 100 * idle / max(idle + busy, 1e-9),
        }

    def compare(self, name: str, prompts: Sequence[Sequence[int]], tokens: int, rounds: int = 1) -> Run:
        """Run requests without and with drafts in turn, and return the medians."""
        plain, drafted = [], []
        self.generate(prompts, min(tokens, 40), True)
        for number in range(rounds):
            plain.append(self.generate(prompts, tokens, False, number * len(prompts)))
            drafted.append(self.generate(prompts, tokens, True, number * len(prompts)))

        def median(runs: list[dict[str, float]], key: str) -> float:
            return statistics.median([run[key] for run in runs])

        ratios = [one["per second"] / other["per second"] for one, other in zip(drafted, plain, strict=True)]
        return Run(
            name,
            len(prompts),
            statistics.median(ratios),
            median(drafted, "per step"),
            median(drafted, "per second"),
            median(plain, "per second"),
            median(drafted, "idle"),
        )

    @torch.inference_mode()
    def steps(self, row_counts: Sequence[int]) -> list[Step]:
        """Replay the graphs of steps over rows of tokens that repeat."""
        runtime, tables = self.runtime, self.runtime.tables
        graphs, slot, sampling = runtime.graphs, runtime.slots[0], tables.sampling
        assert graphs is not None, "no graphs"
        device, rows = sampling.tokens.device, len(sampling.tokens)
        columns = {name: INT_COLUMNS.index(name) for name in INT_COLUMNS}
        sampling.tokens[1:] = torch.arange(sampling.tokens.shape[1], device=device).int() % PERIOD + 100
        for name, value in (("total_len", MAX_LEN), ("max_drafts", 7), ("prompt_len", 400)):
            sampling.ints[1:, columns[name]] = value
        per_row = -(-(CONTEXT + 16) // runtime.page_tables[0].page_size)
        assert runtime.kv.pages > rows * per_row, "too few pages"
        tables.pages[1:, :per_row] = 1 + torch.arange((rows - 1) * per_row, device=device).view(-1, per_row).int()
        lengths = CONTEXT - torch.arange(rows - 1, device=device, dtype=torch.int32) % RING
        # Recurrent layers fold the ring of a row at multiples of its size.
        lengths = lengths if runtime.kv.recurrent else torch.full_like(lengths, CONTEXT)
        found = []
        for count in row_counts:
            slot.device_inputs.zero_()
            slot.device_inputs[:count] = torch.arange(1, count + 1, device=device).int()
            newest = torch.full((count,), -1, dtype=torch.int32, device=device)

            def reset(count: int = count, newest: torch.Tensor = newest) -> None:
                sampling.lengths[1:] = lengths
                slot.device_inputs[count : 2 * count] = newest

            decode = graphs.decode[0][count]
            plain: list[Callable[[], object]] = [
                reset,
                decode.select(CONTEXT).replay,
                decode.sampling[Mode.GREEDY].replay,
            ]
            verify: dict[int, list[Callable[[], object]]] = {
                drafts: [reset, step.forward.replay, step.sampling[Mode.GREEDY].replay]
                for (rows_, drafts), step in sorted(graphs.verify[0].items())
                if rows_ == count
            }
            times = alternately({0: plain, **verify})
            base = times.pop(0)
            found.append(Step(count, base, {f"k={drafts}": value / base for drafts, value in times.items()}))
        return found


def alternately(calls: dict[int, list[Callable[[], object]]], replays: int = 12) -> dict[int, float]:
    """Return the median milliseconds of each list of calls, timed in turn."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS + 1):
        for key, given in calls.items():
            start, end = new_event(), new_event()
            start.record()
            for _ in range(replays):
                for call in given:
                    call()
            end.record()
            end.synchronize()
            times[key].append(start.elapsed_time(end) / replays)
    return {key: statistics.median(values[1:]) for key, values in times.items()}


def measure(bench: Bench, step_rows: Sequence[int], few: Sequence[int], many: Sequence[int]) -> dict[str, Any]:
    """Measure all tables, and print them. few: rows of texts; many: rows of random texts."""
    rng = random.Random(1)
    runs: list[Run] = []

    def keep(run: Run) -> None:
        runs.append(run)
        print(
            f"{run.text:>16} {run.rows:>4} rows {run.over_plain:>6.3f}x {run.tokens_per_step:>5.2f} tokens/step",
            f"{run.tokens_per_second:>8.0f} tok/s (plain {run.plain_tokens_per_second:.0f})",
            f"idle {run.idle_percent:.2f} %",
            flush=True,
        )

    def random_prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(1000, 90_000) for _ in range(RANDOM_PROMPT)] for _ in range(count)]

    for text in texts(tokenizer()):
        bench.force(text.output)
        assert text.output is not None
        for rows in few:
            keep(bench.compare(text.name, [text.prompt] * rows, len(text.output)))
    bench.force([700] * RANDOM_OUTPUT)
    for rows in few:
        keep(bench.compare("constant", random_prompts(rows), RANDOM_OUTPUT))
    bench.force(None)
    for rows in many:
        keep(bench.compare("random", random_prompts(rows), RANDOM_OUTPUT, rounds=2))
    for drafts, acceptance in ((3, 0.7), (7, 0.9)):
        bench.force(None, acceptance)
        bench.fix(drafts)
        for rows in few:
            keep(bench.compare(f"k={drafts} p={acceptance}", random_prompts(rows), RANDOM_OUTPUT // 2))
    bench.fix(None)
    bench.force(None)
    steps = bench.steps(step_rows)
    for step in steps:
        line = " ".join([f"{name} {value:.3f}" for name, value in step.over_plain.items()])
        print(f"{step.rows:>4} rows plain {step.plain_ms:.3f} ms, verify over it: {line}", flush=True)
    print(bench.growth, f"(of {bench.start_seconds:.1f} s)", flush=True)
    return {"steps": to_builtins(steps), "runs": to_builtins(runs), "start": bench.growth, "log": bench.log}


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="rows of the table of steps")
    parser.add_argument("--text-rows", type=int, nargs="+", default=[1, 8], help="rows of texts that repeat")
    parser.add_argument("--random-rows", type=int, nargs="+", default=[1, 8, 64], help="rows of random texts")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser


def main() -> None:
    arguments = arguments_parser().parse_args()
    rows = sorted({*arguments.rows, *arguments.text_rows, *arguments.random_rows})
    options = EngineOptions(
        model=str(arguments.shape),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        max_rows=rows[-1],
        max_len=MAX_LEN,
        kv_tokens=max(rows[-1] * (CONTEXT + 64), 8 * (PROMPT + OUTPUT + 64), 2 * MAX_LEN),
        graph_rows=",".join(map(str, rows)),
        graph_tokens="512,2048",
        prefix_cache="off",
    )
    found = measure(Bench(options), arguments.rows, arguments.text_rows, arguments.random_rows)
    if arguments.save:
        names = ("rows", "text_rows", "random_rows")
        config = {"shape": arguments.shape.name} | {name: getattr(arguments, name) for name in names}
        print(save(arguments.save, config, found))


if __name__ == "__main__":
    main()
