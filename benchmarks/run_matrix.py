"""Compare batching and KV configurations: a server each, the same loads.

    python -m benchmarks.run_matrix --save NAME                                   # CPU, default model, an eighth
    python -m benchmarks.run_matrix --save NAME --shape benchmarks/shapes/llama-3.2-1b     # CUDA, random weights

Parts, each with figures that are medians over `--trials`, and `--scale N`, which divides all lengths:

- matrix: servers static contiguous, continuous, paged, chunked, prefix (`benchmarks/matrix/configurations.py`), each
  with the same rows, KV tokens and positions per step. Loads (`scenarios.py`): W1 256 in and 256 out; W2 32 to 1,024
  in and 64 to 256 out; W3 chats that share a system prompt of 1,024 tokens, first new (cold), then cached (warm).
- policies: every policy under W2 and W3, with half as many rows as streams and three request priorities.
- capacity: the number of concurrent sequences of W2's lengths in equal memory while others wait.
- long-prompts: the ITL of running streams during the prefill of prompts of 8,192 tokens.

`python -m benchmarks.report benchmarks/results/NAME.json` writes the report.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.matrix.bench import Bench
from benchmarks.matrix.parts import PARTS, Parts
from benchmarks.matrix.server import ServerDiedError
from benchmarks.measuring.results import save
from benchmarks.shapes.make_folder import make_folder
from tandem.frontend.cli.bench.clients import ClientDiedError, Clients


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", required=True, metavar="NAME", help="write benchmarks/results/NAME.json")
    parser.add_argument(
        "--shape", type=Path, help="directory with a config.json: CUDA and random weights (default: CPU)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default all)")
    parser.add_argument("--scale", type=int, help="divides all lengths (default 1 with --shape, else 8)")
    parser.add_argument("--streams", type=int, default=16, help="(default 16)")
    parser.add_argument("--requests", type=int, default=3, help="requests per stream and trial (default 3)")
    parser.add_argument("--trials", type=int, default=3, help="(default 3)")
    parser.add_argument("--rows", type=int, default=64, help="--max-rows of the matrix (default 64)")
    parser.add_argument(
        "--starved-ms", type=float, default=250.0, help="shortest gap that counts as starving (default 250)"
    )
    parser.add_argument("--clients", type=int, default=2, help="client processes (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--quick", action="store_true", help="one short trial of everything, to see that it works")
    return parser


def hardware(shape: Path | None) -> dict[str, str]:
    """Describe the machine: cores, memory, GPU and driver. See also `results.origin`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"cores": str(len(os.sched_getaffinity(0))), "memory": f"{memory:.0f} GiB"}
    if shape is None:
        return found | {"device": "cpu"}
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return found | {"device": "cuda", "gpu": lines[0] if lines else "unknown"}


def settings(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    if arguments.scale is None:
        arguments.scale = 1 if arguments.shape else 8
    if arguments.quick:
        arguments.trials, arguments.requests, arguments.streams, arguments.rows = 1, 1, 4, 8
    if min(arguments.scale, arguments.streams, arguments.requests, arguments.trials, arguments.clients) < 1:
        parser.error("--scale, --streams, --requests, --trials and --clients must be at least 1")
    if arguments.rows < arguments.streams:
        parser.error(f"--rows {arguments.rows} is below --streams {arguments.streams}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = settings(argv)
    work = Path(tempfile.mkdtemp(prefix="matrix-"))
    model = None
    if arguments.shape is not None:
        model = work / "model"
        make_folder(arguments.shape, model)
    name = "model" if model is not None else "tandem-default"
    try:
        with Clients(arguments.clients) as clients, Clients(1) as others:
            bench = Bench(name, arguments.seed, arguments.starved_ms, clients, others)
            report = Parts(arguments, bench, model, work, hardware(arguments.shape)).run()
    except (ConnectionError, ClientDiedError, ServerDiedError) as error:
        sys.exit(f"run_matrix: {error}\nlogs of the servers: {work}")
    config = {
        key: value if isinstance(value, int | float | list) else str(value)
        for key, value in vars(arguments).items()
        if value is not None
    }
    figures: dict[str, Any] = msgspec.to_builtins(report)
    print(save(arguments.save, config, figures))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
