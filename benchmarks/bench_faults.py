"""Seconds until clients get an error and are served again after faults of a service with several frontends.

    python -m benchmarks.bench_faults [--streams 100 2000] [--frontends 4] [--only NAME ...] [--save NAME]
        [--tokens N] [--real FLAGS ...]

Each fault gets a new server: `tandem serve` with real processes, sockets and supervision, and a scripted engine. By
default streams get 20 tokens a second, 5 from 1,000 streams on. Every token of every stream is checked: a missing or
repeated one ends the run. After each fault all clients disconnect, and rows and pages that the engine still holds are
counted as leaked.

--real, the last flag, starts a real engine with the flags after it, such as `--streams 300 --real --max-rows 320
--max-len 1024` on two cores. On a GPU, use a model folder of random weights (`benchmarks.shapes.make_folder`) and
`--tokens 6000 --tokens-per-second 200`, so that streams outlast the fault.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from msgspec import to_builtins

from benchmarks.frontends.drill import Outcome, Setup
from benchmarks.frontends.faults import FAULTS, SCRIPTED_ONLY, measure
from benchmarks.frontends.silent_link import measure_pulled_cable, measure_silence
from benchmarks.measuring.results import save

MANY, FAST, SLOW = 1000, 20.0, 5.0
LINKS = {"silent-link": measure_silence, "pulled-cable": measure_pulled_cable}
"""Faults of the link to an engine on another host. The second requires root, and runs only if named."""
NAMES = [*FAULTS, *LINKS]


def rate_of(streams: int, asked: float | None) -> float:
    """Return the tokens per second of each stream."""
    if asked is not None:
        return asked
    return SLOW if streams >= MANY else FAST


def text(outcome: Outcome) -> str:
    """Format an outcome as a few lines."""
    times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in outcome.seconds.items())
    counts = ", ".join(f"{name} {number:g}" for name, number in outcome.counts.items())
    return (
        f"{outcome.fault}, {outcome.streams} streams (goal: {outcome.goal})\n  {times}\n  {counts}\n"
        f"  leaked: {outcome.leaked_rows:g} rows, {outcome.leaked_pages:g} pages"
    )


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 2000], help="(default: 100 2000)")
    parser.add_argument("--frontends", type=int, default=4, help="(default: 4)")
    parser.add_argument("--tokens-per-second", type=float, metavar="R", help="of each stream")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=NAMES[:-1],
        metavar="NAME",
        help=", ".join(NAMES) + " (default: all but the last, which needs root)",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="of a stream that is still open when its fault comes")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    parser.add_argument("--real", nargs=argparse.REMAINDER, metavar="FLAGS", help="flags of a real engine; comes last")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, and return 1 if anything leaked."""
    arguments = arguments_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stop the servers
    real = None if arguments.real is None else tuple(arguments.real)
    found: list[Outcome] = []
    for streams in arguments.streams:
        rate = rate_of(streams, arguments.tokens_per_second)
        setup = Setup(streams, arguments.frontends, rate, real, arguments.tokens)
        for name in arguments.only:
            if real is not None and name in (*SCRIPTED_ONLY, *LINKS):
                continue
            with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
                path = Path(folder)
                found.append(LINKS[name](setup, path) if name in LINKS else measure(name, setup, path))
            print(text(found[-1]), flush=True)
    if arguments.save:
        config = {"streams": arguments.streams, "frontends": arguments.frontends, "real": real, "cores": os.cpu_count()}
        print(save(arguments.save, config, to_builtins(found)))
    return int(any(outcome.leaked_rows or outcome.leaked_pages for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
