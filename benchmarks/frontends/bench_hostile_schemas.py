"""Cost of hostile schemas to clients with ordinary ones.

    python -m benchmarks.frontends.bench_hostile_schemas [--clients 16] [--grammars 100] [--save NAME]

Runs a server with the default model on a CPU, without API keys. --clients hostile clients send schemas that take up to
3 s of CPU time to compile, one at a time each; another process requests /health/live on a new connection every 0.1 s.
Meanwhile an ordinary client sends --grammars completions of two tokens one after the other, each with a new ordinary
schema. The table has their latency with and without the hostile clients. The limit is 1 s at p99.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from msgspec import Struct, to_builtins

from benchmarks.frontends.hostile import live_probe
from benchmarks.measuring.results import save
from tests.support.hostile_schemas import constrained, hostile_schema, ordinary_schema
from tests.support.serving import Serving
from tests.support.stream_client import Stream, StreamClient

MAX_SECONDS = 1.0
"""Limit of p99."""
GUARD_SECONDS = 120.0
SETTLE_SECONDS = 10.0
"""Head start of the hostile clients, to fill every queue."""


class Figures(Struct, frozen=True):
    """Latency in seconds of ordinary requests and of /health/live."""

    clients: int
    """Number of hostile clients."""
    p50: float
    p99: float
    worst: float
    live_p99: float
    live_worst: float
    statuses: dict[str, int]
    """Number of answers to ordinary requests by status."""
    hostile: dict[str, int]
    """Number of answers to hostile requests by status."""


class Crowd:
    """Hostile clients, which each send their next schema once the previous one is answered."""

    def __init__(self, client: StreamClient, size: int) -> None:
        self._client = client
        self._size = size
        self._sent: list[Stream] = []
        self._open: list[Stream] = []

    def poll(self, seconds: float) -> None:
        """Wait for answers, and replace finished requests."""
        self._client.poll(seconds)
        self._open = [stream for stream in self._open if not stream.outcome]
        while len(self._open) < self._size:
            new = self._client.open(constrained(hostile_schema(len(self._sent))))
            self._open += new
            self._sent += new

    def statuses(self) -> dict[str, int]:
        """Return the number of answers by status."""
        return dict(sorted(Counter(str(stream.status) for stream in self._sent if stream.outcome).items()))


def measure(serving: Serving, clients: int, grammars: int, first: int) -> Figures:
    """Send ordinary requests while hostile clients run.

    first: number of the first ordinary schema.
    """
    statuses: Counter[str] = Counter()
    seconds: list[float] = []
    with StreamClient(serving.address, has_letters=False) as client, live_probe(serving.address) as live:
        crowd = Crowd(client, clients)
        end = time.monotonic() + (SETTLE_SECONDS if clients else 0)
        while time.monotonic() < end:
            crowd.poll(0.02)
        for number in range(first, first + grammars):
            (stream,) = client.open(constrained(ordinary_schema(number)))
            while not stream.outcome and time.monotonic() < stream.opened + GUARD_SECONDS:
                crowd.poll(0.002)
            seconds.append((stream.ended or time.monotonic()) - stream.opened)
            statuses[str(stream.status)] += 1
        probes = live()
        answers = crowd.statuses()
    p50, p99 = (float(np.percentile(seconds, share)) for share in (50, 99))
    figures = (p50, p99, max(seconds), float(np.percentile(probes, 99)), max(probes))
    return Figures(clients, *(round(figure, 4) for figure in figures), statuses=dict(statuses), hostile=answers)


def table(figures: list[Figures]) -> str:
    """Format a table with a line per number of hostile clients."""
    head = f"{'clients':>7} {'p50 s':>8} {'p99 s':>8} {'worst s':>8} {'live p99':>9} {'worst':>8}"
    lines = [f"{head}  answers; to hostile ones"]
    for row in figures:
        times = f"{row.p50:8.3f} {row.p99:8.3f} {row.worst:8.3f} {row.live_p99:9.3f} {row.live_worst:8.3f}"
        lines.append(f"{row.clients:7} {times}  {row.statuses}; {row.hostile}")
    return "\n".join([*lines, f"(ceiling) {'':6} {MAX_SECONDS:8.3f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--grammars", type=int, default=100, help="(default %(default)s)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Serving(Path(folder) / "log", "--device", "cpu") as serving:
        measure(serving, 0, 10, 0)
        figures = [
            measure(serving, clients, arguments.grammars, 1000 * (index + 1))
            for index, clients in enumerate((0, arguments.clients))
        ]
    print(table(figures))
    if arguments.save:
        config = {"clients": arguments.clients, "grammars": arguments.grammars}
        print(save(arguments.save, config, to_builtins(figures)))
    return int(figures[-1].p99 > MAX_SECONDS or set(figures[-1].statuses) != {"200"})


if __name__ == "__main__":
    sys.exit(main())
