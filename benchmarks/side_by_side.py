"""Loads of the comparison with vLLM, against any OpenAI-compatible server.

    python -m benchmarks.side_by_side --url http://host:port[,http://host:port2] --model NAME --shape llama-3.2-1b
        [--loads 1b-256 ...] [--trials 3] [--metrics http://host:ops-port/metrics] [--save NAME]

The loads and vLLM's figures are in `benchmarks/reference/side_by_side.json`, with their origin; loads without figures
are our own, to avoid tuning to the comparison. A load is a number of streams that each send their next request once the
previous one is answered, after a warm-up request. Every trial has new prompts, so that no prefix cache helps. Reports
median, minimum and maximum over the trials of output tokens/s, TTFT p50 and ITL p99 in milliseconds, with ITL as in
`bench_serving` without token ids. With --metrics the engine's counters over all trials give the time by stage and the
GPU's idle time; nothing else may load the server then.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.measuring import engine_counters
from benchmarks.measuring.engine_counters import Counters, EngineReader, added, fetch
from benchmarks.measuring.results import save
from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import ClientDiedError, Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.level import Level, Slo, summarise
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.progress import Progress

LOADS = Path(__file__).parent / "reference" / "side_by_side.json"
PROMPT_IDS = Span(100, 1000)
SLO = Slo(ttft_ms=500.0, tpot_ms=50.0)
FIGURES: dict[str, Callable[[Level], float]] = {
    "tokens/s": lambda level: level.output_tokens_per_s,
    "TTFT p50 ms": lambda level: level.ttft_ms.get("p50", 0.0),
    "ITL p99 ms": lambda level: level.itl_ms.get("p99", 0.0),
}


class ComparedLoad(Struct, frozen=True):
    """Load, with vLLM's figures."""

    name: str
    shape: str
    streams: int
    input_len: str
    output_len: str
    requests: int
    temperature: float = 0.0
    top_p: float | None = None
    vllm: tuple[float, float, float] | None = None
    """vLLM's figures in the order of FIGURES; None if not measured."""


class Comparison(Struct, frozen=True):
    """Loads in the order in which they run."""

    origin: str
    loads: list[ComparedLoad]


class Measured(Struct):
    """Figures of a load."""

    load: ComparedLoad
    figures: dict[str, tuple[float, float, float]]
    """Median, minimum and maximum of the trials."""
    failed: int
    """Incomplete requests in all trials."""
    engine: dict[str, Any] | None = None
    """Engine counters, see `engine_counters.figures`; None without --metrics."""


class Trials:
    """Trials of loads against a server."""

    def __init__(self, arguments: argparse.Namespace, clients: Clients) -> None:
        self._clients = clients
        self._endpoints = [Endpoint.parse(url) for url in arguments.url.split(",")]
        self._model, self._timeout, self._seed = arguments.model, arguments.timeout, arguments.seed
        self._trials = arguments.trials
        self._engine = EngineReader(partial(fetch, arguments.metrics)) if arguments.metrics else None

    def run(self, load: ComparedLoad) -> Measured:
        """Warm up and measure a load. Raises ConnectionError if no request succeeds."""
        levels = []
        counted: Counters = {}
        for trial in range(self._trials):
            self._send(load, f"warmup {load.name} {trial}", 1, {})
            levels.append(self._send(load, f"{load.name} {trial}", load.requests, counted))
        figures = {}
        for name, figure in FIGURES.items():
            values = [figure(level) for level in levels]
            figures[name] = (statistics.median(values), min(values), max(values))
        engine = engine_counters.figures(counted) if counted else None
        return Measured(load, figures, sum(sum(level.errors.values()) for level in levels), engine)

    def _send(self, load: ComparedLoad, label: str, requests: int, counted: Counters) -> Level:
        """Send requests to the server.

        counted: receives the increments of the engine's counters.
        """
        planned = Load(label, load.streams, requests=requests)
        workload = Workload(self._seed, Span.parse(load.input_len), Span.parse(load.output_len), PROMPT_IDS)
        dialect = Dialect(self._model, load.temperature, top_p=load.top_p)
        progress = Progress(label, planned.total(), None)
        before = self._engine.read() if self._engine else None
        shares = self._clients.run(Job(self._endpoints, dialect, workload, planned, self._timeout), progress)
        progress.clear()
        level = summarise(planned, shares, SLO)
        if not level.completed:
            raise ConnectionError(f"no request of {label} succeeded; {level.error_example}")
        if self._engine and before is not None:
            counted.update(added(counted, self._engine.since(before, level.completed)))
        return level


def read_loads(shape: str, names: list[str] | None) -> tuple[str, list[ComparedLoad]]:
    """Return the origin of vLLM's figures, and the loads of a shape.

    names: of the loads, or all of them if None. Raises ValueError for an unknown name or shape.
    """
    comparison = msgspec.json.decode(LOADS.read_bytes(), type=Comparison)
    found = {load.name: load for load in comparison.loads if load.shape == shape}
    if not found:
        raise ValueError(f"--shape {shape}: the shapes are {', '.join(sorted({x.shape for x in comparison.loads}))}")
    if unknown := sorted(set(names or ()) - found.keys()):
        raise ValueError(f"--loads {' '.join(unknown)}: the loads of {shape} are {', '.join(found)}")
    return comparison.origin, [found[name] for name in names or found]


def table(measured: list[Measured]) -> str:
    """Format a line for each load: every figure with its range, next to vLLM's."""
    lines = [f"{'load':>14}" + "".join(f"{name:>30}{'vLLM':>10}" for name in FIGURES)]
    for one in measured:
        cells = ""
        for index, (middle, least, most) in enumerate(one.figures.values()):
            theirs = f"{one.load.vllm[index]:,.6g}" if one.load.vllm else "-"
            cells += f"{f'{middle:,.1f} ({least:,.1f} to {most:,.1f})':>30}{theirs:>10}"
        lines.append(f"{one.load.name:>14}{cells}" + (f"  {one.failed} requests failed" if one.failed else ""))
        if one.engine:
            lines.append(f"{'':>14}  {engine_counters.line(one.engine)}")
    return "\n".join(lines)


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", required=True, help="one or more http://host:port, separated by commas; used round-robin"
    )
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--shape", required=True, help="shape that the server has, as in benchmarks/shapes")
    parser.add_argument("--loads", nargs="+", metavar="NAME", help="loads to run (default: all of the shape)")
    parser.add_argument("--trials", type=int, default=3, help="trials of each load (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="change it between runs against one server (default 0)")
    parser.add_argument("--clients", type=int, default=min(4, os.cpu_count() or 1), help="processes of the client")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take (default 600)")
    parser.add_argument("--metrics", metavar="URL", help="http://host:port/metrics of the ops port (default: not read)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.trials < 1 or arguments.clients < 1:
            raise ValueError("--trials and --clients must be at least 1")
        origin, loads = read_loads(arguments.shape, arguments.loads)
        clients = Clients(arguments.clients)
        trials = Trials(arguments, clients)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    measured: list[Measured] = []
    try:
        with clients:
            for load in loads:
                measured.append(trials.run(load))
                print(table(measured[-1:]), file=sys.stderr)
    except (ConnectionError, ClientDiedError) as error:
        sys.exit(f"side_by_side: {error}")
    print(table(measured))
    print(f"vLLM's figures: {origin}")
    if arguments.save:
        print(save(arguments.save, vars(arguments), {"vllm": origin, "loads": msgspec.to_builtins(measured)}))


if __name__ == "__main__":
    main()
