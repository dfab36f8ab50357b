"""Cost of constrained output: compiling grammars, filling masks and throughput.

    python -m benchmarks.bench_constrained [--model-dir DIR] [--save NAME]
    python -m benchmarks.bench_constrained --url http://host:port --model NAME [--save NAME]
        [--output strings records] [--streams 64 256] [--shares 100] [--rounds 5] [--seconds 80]
        [--metrics http://host:ops-port/metrics] ...

Each schema of `benchmarks/measuring/grammars.py` is compiled a few times, then followed using random allowed tokens.
Mask time is the CPU time of one row on one thread; a step fills the masks of many rows in parallel.

With --url, a running server is measured instead, or in addition if there is a --model-dir. A share of the requests sets
`response_format` to a JSON schema that no output completes, so that all requests generate the same number of tokens.
Each round measures every number of streams without a schema and then each share of each output, in alternating order,
until --rounds or until the next round would exceed --seconds. Throughput is in tokens/s; the loss is relative to the
same round's requests without a schema. Figures are medians over the rounds. With --metrics the engine's counters over
all rounds give the time of a step by stage, its rows and masks, and the idle share of the GPU. Nothing else may load
the server then.
"""

import argparse
import random
import statistics
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from benchmarks.measuring.engine_counters import Counters, EngineReader, added, fetch, figures, line
from benchmarks.measuring.grammars import ENDLESS, SCHEMAS, Schema
from benchmarks.measuring.results import save
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.stats import new_stats
from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.distribution import distribution
from tandem.frontend.cli.bench.level import Slo, summarise
from tandem.frontend.cli.bench.workloads import Load, Request, Span, Workload
from tandem.frontend.progress import Progress

COMPILATIONS, WALKS, LONGEST_WALK = 5, 20, 80
DRAFTS = 3
"""Drafts of a row whose masks are timed."""
SLO = Slo(500.0, 50.0)
Clock = Callable[[], float]


def measure_grammar(
    grammars: Grammars, mask_builder: MaskBuilder, schema: Schema, rng: random.Random
) -> dict[str, Any]:
    """Measure a schema: compilation in milliseconds, and in microseconds a mask, and the masks of a row with drafts."""
    text = LLMatcher.grammar_from_json_schema(schema)
    compilations = []
    for _ in range(COMPILATIONS):
        start = time.perf_counter()
        compiled_grammar = grammars.compile(text)
        compilations.append(time.perf_counter() - start)
    mask = np.zeros((1, ceil_div(grammars.vocab_size, 32)), dtype=np.int32)
    masks, runs = [], []
    for _ in range(WALKS):
        tokens: list[int] = []
        constraint = compiled_grammar.constraint(ignore_ends=True)
        for _ in range(LONGEST_WALK):
            start = time.thread_time()
            mask_builder.fill([(constraint, 0)], mask)
            masks.append(time.thread_time() - start)
            allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
            tokens.append(int(rng.choice(allowed)))
            assert constraint.accept(tokens[-1]), constraint.problem
            if constraint.is_complete:
                break
        runs += measure_runs(compiled_grammar.first, tokens, mask.shape[1])
    return {
        "compile_ms": statistics.median(compilations) * 1e3,
        "mask_us": distribution(masks, 1e6),
        "masks": len(masks),
        "draft_masks_us": distribution(runs or [0.0], 1e6),
    }


def measure_runs(first: LLMatcher, tokens: Sequence[int], words: int) -> list[float]:
    """Return the seconds of the masks that a row with DRAFTS right drafts would need, for each position of a text.

    They are those of the next token and after each draft; the matcher advances by the drafts, and back.
    """
    matcher, masks, times = first.deep_copy(), np.zeros((1 + DRAFTS, words), dtype=np.int32), []
    for index in range(len(tokens) - DRAFTS):
        start = time.thread_time()
        for mask, draft in zip(masks, [*tokens[index : index + DRAFTS], None], strict=True):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if draft is not None:
                assert matcher.consume_token(draft), matcher.get_error()
        assert matcher.rollback(DRAFTS), matcher.get_error()
        times.append(time.thread_time() - start)
        assert matcher.consume_token(tokens[index]), matcher.get_error()
    return times


def measure_grammars(model_dir: Path) -> dict[str, Any]:
    model = read_config(model_dir)
    grammars = Grammars(model_dir / "tokenizer.json", model.vocab_size, model.eos_ids)
    start = time.perf_counter()
    grammars.prepare()
    seconds = time.perf_counter() - start
    mask_builder = MaskBuilder(model.eos_ids, new_stats(), time.perf_counter)
    rng = random.Random(0)
    found = {name: measure_grammar(grammars, mask_builder, schema, rng) for name, schema in SCHEMAS.items()}
    return {"vocab_size": model.vocab_size, "tokenizer_seconds": seconds, "schemas": found}


def print_grammars(measured: dict[str, Any]) -> None:
    print(f"tokenizer of {measured['vocab_size']} tokens: {measured['tokenizer_seconds']:.2f} s, once")
    drafts = f"{1 + DRAFTS} masks p50"
    print(f"{'schema':>28}{'compile ms':>12}{'mask us p50':>13}{'p99':>9}{'masks':>8}{drafts:>14}{'mean':>9}")
    for name, found in measured["schemas"].items():
        mask, runs = found["mask_us"], found["draft_masks_us"]
        line = f"{name:>28}{found['compile_ms']:>12.2f}{mask['p50']:>13.1f}{mask['p99']:>9.1f}{found['masks']:>8}"
        print(line + f"{runs['p50']:>14.1f}{runs['mean']:>9.1f}")


@dataclass(frozen=True)
class ConstrainedDialect(Dialect):
    """Dialect that adds a schema to a share of the requests.

    `share` is in percent; the requests are chosen by their prompts.
    """

    share: int = 0
    schema: Schema = field(default_factory=dict)

    def body(self, request: Request) -> bytes:
        plain = super().body(request)
        if zlib.crc32(array("i", request.prompt).tobytes()) % 100 >= self.share:
            return plain
        wanted = {"type": "json_schema", "json_schema": {"name": "bench", "schema": self.schema}}
        return plain[:-1] + b',"response_format":' + msgspec.json.encode(wanted) + b"}"


@dataclass(frozen=True)
class Cell:
    """Load in which a share of the requests, in percent, is constrained to an output's schema."""

    streams: int
    output: str
    share: int

    def __str__(self) -> str:
        return f"{self.streams} streams, " + (f"{self.output}, {self.share} %" if self.share else "no schema")


def cells(streams: int, outputs: Sequence[str], shares: Sequence[int]) -> list[Cell]:
    """Return the cells of a round for a number of streams, first the one without a schema."""
    constrained = [Cell(streams, output, share) for output in outputs for share in shares if share]
    return [Cell(streams, outputs[0], 0), *constrained]


class Server:
    """Running server under the same load in every cell."""

    def __init__(self, arguments: argparse.Namespace, clients: Clients) -> None:
        self._arguments = arguments
        self._clients = clients
        self._endpoints = [Endpoint.parse(url) for url in arguments.url.split(",")]
        self._engine = EngineReader(partial(fetch, arguments.metrics)) if arguments.metrics else None
        self.counters: dict[Cell, Counters] = {}
        """Engine counters over all rounds of a cell, without warm-up."""

    def warm_up(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self.tokens_per_second(cell, -1)
        self.counters.clear()

    def tokens_per_second(self, cell: Cell, turn: int) -> float:
        """Run one cell.

        Raises ConnectionError if a request failed or a reply has another length, which would make results incomparable.
        """
        a = self._arguments
        schema = ENDLESS[cell.output]
        dialect = ConstrainedDialect(a.model, a.temperature, token_ids=True, share=cell.share, schema=schema)
        workload = Workload(turn, a.input_len, a.output_len, a.prompt_ids)
        load = Load(f"{cell}, round {turn + 1}", cell.streams, requests=a.requests)
        before = self._engine.read() if self._engine else None
        progress = Progress(load.label, load.total(), load.duration)
        level = summarise(
            load, self._clients.run(Job(self._endpoints, dialect, workload, load, a.timeout), progress), SLO
        )
        progress.clear()
        if level.errors or level.other_length:
            raise ConnectionError(f"{load.label}: {level.errors or 'replies of another length'} {level.error_example}")
        if self._engine and before is not None:
            counted = self._engine.since(before, cell.streams * a.requests)
            self.counters[cell] = added(self.counters.get(cell, {}), counted)
        return level.output_tokens_per_s


def measure_rounds(
    measure: Callable[[Cell, int], float], groups: Sequence[list[Cell]], rounds: int, seconds: float, clock: Clock
) -> list[dict[Cell, float]]:
    """Measure each cell once per round, in alternating order.

    Stops when a round as long as the longest would exceed the time limit, but not before the first round.
    """
    found: list[dict[Cell, float]] = []
    began = clock()
    longest = 0.0
    while (len(found) < rounds and clock() + longest <= began + seconds) or not found:
        start, turn = clock(), len(found)
        ordered = [cell for group in groups for cell in group]
        ordered = ordered[::-1] if turn % 2 else ordered
        found.append({cell: measure(cell, turn) for cell in ordered})
        longest = max(longest, clock() - start)
    return found


def losses(rounds: Sequence[dict[Cell, float]], group: Sequence[Cell]) -> dict[str, Any]:
    """Return tokens/s of a group's cells, and the loss against the first cell in percent."""
    free = group[0]
    return {
        str(cell): {
            "streams": cell.streams,
            "output": cell.output,
            "share": cell.share,
            "output_tokens_per_s": statistics.median(found[cell] for found in rounds),
            "loss_percent": statistics.median(100 * (1 - found[cell] / found[free]) for found in rounds),
            "rounds": [found[cell] for found in rounds],
        }
        for cell in group
    }


def measure_server(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens/s and loss of each cell.

    The cells of the last group run once before, as warm-up.
    """
    groups = [cells(streams, arguments.output, arguments.shares) for streams in arguments.streams]
    began = time.monotonic()
    with Clients(arguments.clients) as clients:
        server = Server(arguments, clients)
        server.warm_up(groups[-1])
        left = arguments.seconds - (time.monotonic() - began)
        rounds = measure_rounds(server.tokens_per_second, groups, arguments.rounds, left, time.monotonic)
    found = {name: one for group in groups for name, one in losses(rounds, group).items()}
    for cell, counted in server.counters.items():
        found[str(cell)]["engine"] = figures(counted)
    return found


def print_server(loads: dict[str, Any]) -> None:
    print(f"{'load':>30}{'tokens/s':>12}{'loss %':>9}   by round")
    for name, found in loads.items():
        rounds = ", ".join(f"{rate:,.0f}" for rate in found["rounds"])
        print(f"{name:>30}{found['output_tokens_per_s']:>12,.0f}{found['loss_percent']:>9.1f}   {rounds}")
    for name, found in loads.items():
        if "engine" in found:
            print(f"{name}: {line(found['engine'])}")


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model-dir", type=Path, help="config.json and tokenizer.json for grammars (default: the default model's)"
    )
    parser.add_argument("--url", help="http://host:port of a running server, or several with commas")
    parser.add_argument("--model", default="tandem-default", help="name of the model on the server")
    parser.add_argument("--metrics", metavar="URL", help="http://host:port/metrics of the ops port (default: not read)")
    parser.add_argument("--shares", type=int, nargs="+", default=[100], help="percent; 0 is always measured")
    parser.add_argument("--output", nargs="+", choices=list(ENDLESS), default=["strings", "records"])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="requests open at once")
    parser.add_argument("--requests", type=int, default=4, help="requests a stream and round (default 4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=80.0, help="most for all rounds (default 80)")
    parser.add_argument("--clients", type=int, default=1, help="client processes (default 1)")
    parser.add_argument("--input-len", type=Span.parse, default="64")
    parser.add_argument("--output-len", type=Span.parse, default="128")
    parser.add_argument("--prompt-ids", type=Span.parse, default="100:1000")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    if arguments.metrics and not arguments.url:
        parser.error("--metrics is of a running server; give its --url too")
    found: dict[str, Any] = {}
    if arguments.model_dir or not arguments.url:
        found["grammars"] = measure_grammars(arguments.model_dir or DEFAULT_MODEL)
        print_grammars(found["grammars"])
    if arguments.url:
        found["serving"] = measure_server(arguments)
        print_server(found["serving"])
    if arguments.save:
        print(save(arguments.save, {name: _plain(value) for name, value in vars(arguments).items()}, found))


def _plain(value: Any) -> Any:
    """Convert a setting to JSON.

    Paths are reduced to their name, which is the same on any machine.
    """
    if isinstance(value, Path):
        return value.name
    return value if isinstance(value, int | float | list | None) else str(value)


if __name__ == "__main__":
    main()
