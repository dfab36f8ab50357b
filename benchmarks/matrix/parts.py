"""Parts of a run, with their servers and loads."""

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.matrix.bench import Bench
from benchmarks.matrix.configurations import Configuration, matrix, with_chunk, with_policy
from benchmarks.matrix.figures import (
    Cell,
    Figures,
    Held,
    Measured,
    PrefillTrial,
    ServerFacts,
    median_of,
    medians,
    prefill_medians,
)
from benchmarks.matrix.long_prompts import LongPrompts
from benchmarks.matrix.scenarios import LONG_PROMPT, MAX_LEN, Scenario, scenarios
from benchmarks.matrix.server import Server
from tandem.frontend.cli.main import build_parser
from tandem.protocol.engine_options import POLICIES

PARTS = ("matrix", "policies", "capacity", "long-prompts")
POLICY_STEP_TOKENS = 512
"""Tokens per step in the policy sweep, divided by the scale."""
PRIORITIES = (0, 1, 2)
"""Priorities of consecutive requests in the policy sweep."""
CHUNKS = (2048, 256, 64)
"""Chunk sizes for long prompts, divided by the scale."""
HELD_LENGTHS, HELD_STREAMS = 8, 16
"""Pool size of the capacity comparison in sequences of maximum length, the number that contiguous mode holds of any
length, and streams per such sequence, more than pages can hold."""
HELD_REQUESTS = 2
"""Requests per stream and trial."""
GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
UNREPORTED = ("run", "port", "ops_port", "model", "api_key")
"""Flags omitted from reports: paths and secrets."""


class Parts:
    """Run that starts the servers of each part and fills a report."""

    def __init__(self, arguments: Namespace, bench: Bench, model: Path | None, work: Path, hardware: dict[str, str]):
        """Choose the flags shared by all servers.

        model: folder to serve with random weights on CUDA; None for the default model on a CPU.
        """
        self.arguments, self.bench, self.work = arguments, bench, work
        self.scale: int = arguments.scale
        self.max_len = MAX_LEN // self.scale
        self.cuda = model is not None
        self.common = ["--max-concurrent", "4096", "--log-level", "warning"]
        self.model_flags: list[str] = []
        if model is not None:
            self.common += ["--load-format", "dummy", "--device", "cuda"]
            self.model_flags += ["--model", str(model)]
        else:
            self.common += ["--device", "cpu"]
        self.loads = scenarios(self.scale, arguments.streams, arguments.requests)
        says = {load.name: load.says for load in self.loads}
        self.report = Measured(hardware, " ".join(self.common), says)

    @contextmanager
    def server(self, configuration: Configuration, **sizes: int) -> Iterator[Server]:
        """Start a server and add it to the report.

        sizes: flags shared by the servers of a part.
        """
        own = [str(word) for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", size)]
        if self.cuda:
            own += ["--graph-rows", ",".join(str(count) for count in GRAPH_ROWS if count <= sizes["max_rows"])]
        own += configuration.flags
        flags = [*self.common, *own]
        name = configuration.name
        with Server([*flags, *self.model_flags], self.work / f"{name.replace(' ', '_')}.log") as server:
            print(f"{name}: ready in {server.ready_seconds:.1f} s", file=sys.stderr, flush=True)
            self.report.servers[name] = ServerFacts(
                configuration.says, " ".join(own), server.ready_seconds, all_flags(flags), server.settings()
            )
            yield server

    @contextmanager
    def all_at_once(self, configurations: Sequence[Configuration], **sizes: int) -> Iterator[dict[str, Server]]:
        """Start a server for each configuration, and yield them by name.

        All run at the same time and are measured alternately, so that machine noise affects all alike. An idle server
        costs only its heartbeat.
        """
        with ExitStack() as stack:
            yield {one.name: stack.enter_context(self.server(one, **sizes)) for one in configurations}

    def cells(
        self, configurations: Sequence[Configuration], loads: Sequence[Scenario], rows: int, step_tokens: int
    ) -> list[Cell]:
        """Run all loads of all trials, after one warm-up load."""
        trials: dict[tuple[str, str], list[Figures]] = defaultdict(list)
        sizes = {"max_rows": rows, "max_len": self.max_len, "kv_tokens": rows * self.max_len}
        with self.all_at_once(configurations, **sizes, max_step_tokens=step_tokens) as servers:
            for server in servers.values():
                self.bench.trial(server, self.loads[1], -1)
            for trial, load in product(range(self.arguments.trials), loads):
                for name, server in servers.items():
                    trials[name, load.name].append(self.bench.trial(server, load, trial))
        return [Cell(name, load, medians(found), found) for (name, load), found in trials.items()]

    def run_matrix(self) -> None:
        rows = self.arguments.rows
        self.report.matrix = self.cells(matrix(self.scale), self.loads, rows, self.max_len + rows)

    def run_policies(self) -> None:
        """Compare policies with small steps and half as many rows as streams, so that sequences queue."""
        rows = max(1, self.arguments.streams // 2)
        loads = [replace(load, priorities=PRIORITIES) for load in self.loads[1:]]
        step_tokens = max(rows, POLICY_STEP_TOKENS // self.scale)
        self.report.policies = self.cells([with_policy(policy) for policy in POLICIES], loads, rows, step_tokens)

    def run_capacity(self) -> None:
        """Measure the capacity of continuous, paged and chunked servers, with rows to spare."""
        lengths = 2 if self.arguments.quick else HELD_LENGTHS * (2 if self.cuda else 1)
        streams, kv_tokens = HELD_STREAMS * lengths, lengths * self.max_len
        load = scenarios(self.scale, streams, HELD_REQUESTS)[1]
        sizes = {"max_rows": streams, "max_len": self.max_len, "kv_tokens": kv_tokens}
        configurations = [replace(base, name=f"capacity, {base.name}") for base in matrix(self.scale)[1:4]]
        trials: dict[str, list[dict[str, float]]] = defaultdict(list)
        with self.all_at_once(configurations, **sizes, max_step_tokens=self.max_len + streams) as servers:
            for trial, (name, server) in product(range(self.arguments.trials), servers.items()):
                trials[name].append(self.bench.held(server, load, trial))
        self.report.held = [
            held(name.removeprefix("capacity, "), kv_tokens, streams, found) for name, found in trials.items()
        ]

    def run_long_prompts(self) -> None:
        quick, streams = self.arguments.quick, self.arguments.streams
        prompt = LONG_PROMPT // self.scale
        load = LongPrompts(streams, MAX_LEN // 2 // self.scale, prompt, 2 if quick else 12 if self.cuda else 6)
        max_len, rows = prompt + load.stream_tokens, streams + 4
        sizes = {"max_rows": rows, "max_len": max_len, "kv_tokens": 2 * rows * load.stream_tokens + 4 * max_len}
        configurations = [with_chunk(max(1, size // self.scale)) for size in CHUNKS]
        trials: dict[str, list[PrefillTrial]] = defaultdict(list)
        with self.all_at_once(configurations, **sizes, max_step_tokens=CHUNKS[0] // self.scale + rows) as servers:
            for trial, (name, server) in product(range(self.arguments.trials), servers.items()):
                trials[name].append(self.bench.long_prompts(server, load, trial))
        self.report.prefill_gaps = {name: prefill_medians(found) for name, found in trials.items()}

    def run(self) -> Measured:
        parts = dict(
            zip(PARTS, (self.run_matrix, self.run_policies, self.run_capacity, self.run_long_prompts), strict=True)
        )
        for name in self.arguments.parts:
            parts[name]()
        return self.report


def all_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return every flag of `tandem serve` by name, given or with its default.

    The flags of `UNREPORTED` are left out.
    """
    found = vars(build_parser().parse_args(["serve", *flags]))
    plain = (int, float, str, bool, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in sorted(found.items())
        if name not in UNREPORTED
    }


def held(name: str, kv_tokens: int, rows: int, trials: Sequence[dict[str, float]]) -> Held:
    """Return the medians of trials, with 0 for missing figures."""
    found = median_of(trials)
    names = ("running", "step_rows", "peak", "preemptions", "seconds", "output_tokens_per_s")
    return Held(name, kv_tokens, rows, **{name: found.get(name, 0.0) for name in names})
