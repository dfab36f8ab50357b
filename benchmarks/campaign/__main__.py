"""Run a plan of tests and measurements on one GPU, within a time.

    python -m benchmarks.campaign --out DIR [--minutes 40] [--only NAME ...] [--plan FILE] [--list]

The measurements are in a plan, `benchmarks/campaign/h200.toml` or `h100.toml`, in the order of their worth: those of a
group run one after the other beside one `tandem serve` of random weights, or beside none. What would not end within
--minutes is left out. DIR gets a log of each, its result, and `runs.jsonl`; what is done there is not measured again:
a campaign that was cut off goes on where it stopped. Results replace those of their name in `benchmarks/results`.
--list prints names and planned seconds.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.campaign.plan import PLANS, Group, choose, read_plan
from benchmarks.campaign.runner import Places, Runner
from benchmarks.matrix.server import Server
from benchmarks.shapes.make_folder import make_folder
from benchmarks.tune.shapes import SHAPES
from tandem.engine_core.startup.engine import DEFAULT_MODEL

TOKENIZERS = {"made-up": None, "default-model": DEFAULT_MODEL}
"""Folders of the models whose tokenizer a group may have; None for one that is made up."""


@contextmanager
def serve(group: Group, out: Path) -> Iterator[Places]:
    """Make a group's model folder and serve it with random weights.

    Raises ServerDiedError if the server is not ready.
    """
    if not group.shape:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="campaign-") as work:
        folder = Path(work) / "model"
        make_folder(SHAPES / group.shape, folder, TOKENIZERS[group.tokenizer])
        places = {"model": folder.name, "folder": str(folder)}
        if not group.serve:
            yield places
            return
        flags = ["--model", str(folder), "--load-format", "dummy", *group.flags.split()]
        with Server(flags, out / f"{group.name}.server.log") as server:
            print(f"{group.name}: ready after {server.ready_seconds:.1f} s", flush=True)
            yield places | {"url": server.url, "metrics": server.metrics_url}
            (out / f"{group.name}.metrics").write_text(server.metrics())


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where logs and results go")
    parser.add_argument("--minutes", type=float, default=40.0, help="(default 40)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups or measurements (default all)")
    parser.add_argument(
        "--plan", type=Path, default=PLANS / "h200.toml", help="(default benchmarks/campaign/h200.toml)"
    )
    parser.add_argument("--list", action="store_true", help="print the plan and measure nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if anything failed."""
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    try:
        plan = read_plan(arguments.plan)
        if arguments.list:
            listed = list(choose(plan, arguments.only, set()))
            for group in listed:
                print(f"{group.name}: {group.shape or 'no model'}, {group.start_seconds} s to start")
                for one in group.measurement:
                    print(f"  {one.name:32} {one.seconds:>4} s  {' '.join(one.command.split())}")
            print(f"{sum(group.seconds for group in listed) / 60:.1f} minutes in all, starts included")
            return 0
        if arguments.out is None:
            parser.error("--out DIR says where logs and results go")
        out: Path = arguments.out
        out.mkdir(parents=True, exist_ok=True)
        runner = Runner(
            out, time.monotonic() + 60 * arguments.minutes, lambda group: serve(group, out),
            lambda line: print(line, flush=True),
        )  # fmt: skip
        groups = list(choose(plan, arguments.only, runner.done()))
    except msgspec.MsgspecError as error:
        parser.error(f"{arguments.plan}: {error}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not groups:
        print(f"all of that is done in {runner.runs_file}; give another --out to measure it again")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without what it has started
    runs = runner.run(groups)
    print("\n".join(f"{run.name:32} {run.outcome:10} {run.seconds:>6.0f} s" for run in runs))
    return int(any(run.outcome in ("failed", "stopped") for run in runs))


if __name__ == "__main__":
    sys.exit(main())
