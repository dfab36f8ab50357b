"""Seconds until clients are told and served after faults of several frontends.

    python -m benchmarks.bench_faults [--streams 100 2000] [--frontends 4] [--only NAME ...] [--save NAME]

Each fault has a server of its own: `tandem serve` with real processes, sockets and supervision, and a scripted engine.
With 1,000 streams and more each stream gets 5 tokens a second, otherwise 20; --tokens-per-second changes that. Every
token of every stream is checked: a missing or repeated one ends the run. After each fault all clients leave, and the
rows and pages that the engine still holds are counted as leaked.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from msgspec import to_builtins

from benchmarks.frontends.faults import FAULTS, Outcome, Setup, measure
from benchmarks.measuring.results import save

MANY, FAST, SLOW = 1000, 20.0, 5.0


def rate_of(streams: int, asked: float | None) -> float:
    """Return the tokens a second of each stream."""
    if asked is not None:
        return asked
    return SLOW if streams >= MANY else FAST


def text(outcome: Outcome) -> str:
    """Format one outcome as a few lines."""
    times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in outcome.seconds.items())
    counts = ", ".join(f"{name} {number:g}" for name, number in outcome.counts.items())
    return (
        f"{outcome.fault}, {outcome.streams} streams (goal: {outcome.goal})\n  {times}\n  {counts}\n"
        f"  leaked: {outcome.leaked_rows:g} rows, {outcome.leaked_pages:g} pages"
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, and return 1 if anything leaked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 2000], help="(default: 100 2000)")
    parser.add_argument("--frontends", type=int, default=4, help="(default: 4)")
    parser.add_argument("--tokens-per-second", type=float, metavar="R", help="of each stream")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="NAME",
                        help=", ".join(FAULTS))  # fmt: skip
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args(argv)
    found: list[Outcome] = []
    for streams in arguments.streams:
        setup = Setup(streams, arguments.frontends, rate_of(streams, arguments.tokens_per_second))
        for name in arguments.only:
            with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
                found.append(measure(name, setup, Path(folder)))
            print(text(found[-1]), flush=True)
    if arguments.save:
        config = {"streams": arguments.streams, "frontends": arguments.frontends, "cores": os.cpu_count()}
        print(save(arguments.save, config, to_builtins(found)))
    return int(any(outcome.leaked_rows or outcome.leaked_pages for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
