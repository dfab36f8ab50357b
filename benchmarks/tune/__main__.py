"""Measure the tiles of kernels on the GPU at hand, and write its tile table.

    python -m benchmarks.tune --model 1b 8b --minutes 4 [--rows 1 64] [--bits 16 8 4] [--only products|decode]

The shapes are those of the models. Candidates are compiled in parallel, then timed in CUDA graphs over more weights, or
keys and values, than the cache holds, each product behind the norm before it. Times are kept as they are measured: a
run that ended early goes on where it stopped. What is printed: the time of today's plan, of the rule's and of the best.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import cast

import torch
from torch import version as torch_version

from benchmarks.tune.attention import KV_DTYPES, DecodeTimer
from benchmarks.tune.candidates import chosen, decode_candidates, product_candidates, ruled
from benchmarks.tune.compiling import compile_all, identity, jobs_of
from benchmarks.tune.products import ProductTimer
from benchmarks.tune.shapes import decode_keys, product_keys, read_models
from benchmarks.tune.timings import AnyPlan, Choice, Key, Task, Timings, choose_best, measure, merged
from tandem.engine_core.kernels.attention.paged_decode import choose_plan
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Plan
from tandem.engine_core.kernels.tiles.table import BUCKETS, KERNEL_VERSION, NO_TABLE, DecodeKey, ProductKey
from tandem.engine_core.kernels.tiles.table_file import file_name, packaged, write_table
from tandem.engine_core.runtime.device import read_gpu_traits

COMPILING = 0.55
"""Share of the time that may go into compiling."""
DECODE_BATCHES = (8, 32, 64, 128, 256)
"""Rows of decode attention; one row of short context is in the cache whatever the tile."""


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["1b", "8b"], help="1b, 8b, 4b, a shape's name or a folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 32, 1, 128, 16], choices=BUCKETS)
    parser.add_argument("--bits", type=int, nargs="+", default=[16], choices=(16, 8, 4), help="bits of a weight")
    parser.add_argument("--kv-bits", type=int, nargs="+", default=[16], choices=(16, 8), help="bits of keys and values")
    parser.add_argument("--only", choices=("products", "decode"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, help="the table; by default the packaged one of this GPU")
    parser.add_argument("--timings", type=Path, help="where times are kept; by default beside no table, in ~/.cache")
    return parser.parse_args(arguments)


def list_tasks(options: argparse.Namespace, gpu: GpuTraits) -> list[Task]:
    """List what to tune, each key once.

    Decode attention comes first, as it has few plans.
    """
    models = read_models(options.model)
    bare = GpuTraits(gpu.name, gpu.capability, gpu.multiprocessors, gpu.shared_memory, NO_TABLE)
    tasks: dict[Key, Task] = {}
    if options.only != "products":
        for key in (key for model in models for key in decode_keys(model, DECODE_BATCHES, options.kv_bits)):
            given = key.head_dim, key.pairs, torch.bfloat16, KV_DTYPES[key.kv_bits]
            today, rule = (choose_plan(*given, one) for one in (gpu, bare))
            tasks[key] = Task(key, decode_candidates(key, today, rule), rule)
    if options.only != "decode":
        for product in (key for model in models for key in product_keys(model, options.rows, options.bits)):
            plans = product_candidates(product, gpu)
            if plans and plans[0] == chosen(product, gpu):
                tasks[product] = Task(product, plans, ruled(product, gpu))
    return list(tasks.values())


class Timer:
    """Timer of products and of decode attention."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.products = ProductTimer(gpu.pdl)
        self.decode = DecodeTimer(gpu)

    def __call__(self, key: Key, plan: AnyPlan) -> float:
        """Return microseconds, infinite for a plan that does not run."""
        try:
            if isinstance(key, DecodeKey):
                return self.decode(key, cast("DecodePlan", plan))
            return self.products(key, cast("Plan", plan))
        except Exception as error:
            if "CUDA error" in str(error):
                # Nothing runs on the device any more.
                raise RuntimeError(f"{key} {plan} broke the device") from error
            torch.cuda.empty_cache()
            say(f"{key} {plan}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return float("inf")


def line_of(choice: Choice) -> str:
    """Return the line that says what was found for one key."""
    key, rule = choice.task.key, choice.rule_us
    if isinstance(key, ProductKey):
        name = f"{key.operation} {key.bits} bits {key.outputs}x{key.inputs} rows {key.rows}"
    else:
        name = f"decode head_dim {key.head_dim} KV {key.kv_bits} bits pairs {key.pairs}"
    against = "not timed" if rule is None else f"{rule:8.2f}"
    gain = 1 - choice.us / choice.today_us
    return (
        f"{name:44} today {choice.today_us:8.2f} us  rule {against}  best {choice.us:8.2f}  {gain:5.1%}  {choice.plan}"
    )


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Tune, print a line for each key and write the table."""
    options = read_arguments(arguments)
    began = time.monotonic()
    gpu = read_gpu_traits()
    triton = sys.modules["triton"].__version__
    kept = Path.home() / ".cache" / "tandem-tune" / f"{file_name(gpu.name)}-{KERNEL_VERSION}-{triton}.jsonl"
    timings = Timings.resume(options.timings or kept)
    tasks = list_tasks(options, gpu)
    plans = sum(len(task.plans) for task in tasks)
    say(f"{gpu.name}: {len(tasks)} keys, {plans} plans, {len(timings.found)} times kept in {timings.path}")
    seconds = 60 * options.minutes
    compiled = compile_all(
        jobs_of(tasks, timings),
        gpu,
        COMPILING * seconds - (time.monotonic() - began),
        say,
    )
    with torch.inference_mode():
        complete = measure(
            tasks, Timer(gpu), timings, lambda key, plan: compiled.get(identity(key, plan), "?") == "",
            lambda: time.monotonic() - began > seconds,
        )  # fmt: skip
    choices = choose_best(tasks, timings)
    for choice in choices:
        say(line_of(choice))
    path = options.out or Path(str(packaged(gpu.name)))
    table = merged(gpu.tiles, gpu.name, choices)
    write_table(path, table, {"torch": str(torch_version.__version__), "triton": triton})
    left = "" if complete else "; time ran out, run it again to go on"
    print(f"{path}: {len(table.products)} products, {len(table.decode)} kinds of attention{left}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
