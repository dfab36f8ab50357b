"""Measure the tiles of kernels on the GPU at hand, and write its tile table.

    python -m benchmarks.tune --model 1b 8b --minutes 4 [--rows 1 64] [--bits 16 8 4] [--only products|bytes|decode]

The shapes are those of the models. Candidates are compiled in parallel, then timed in CUDA graphs over more weights, or
keys and values, than the cache holds, each product of 16-bit inputs behind the norm before it. Times are kept as they
are measured: a run that ended early goes on where it stopped. Decode attention comes first, then the products of the
first of --rows, those of bytes with bytes (with --bits 8) of the first of --byte-rows, and so on, for all models. What
is printed: the time of today's plan, of the rule's and of the best.
"""

import argparse
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import cast

import torch
from torch import version as torch_version

from benchmarks.tune.attention import KV_DTYPES, DecodeTimer
from benchmarks.tune.byte_products import FORMATS, ByteTimer, byte_candidates, byte_chosen
from benchmarks.tune.candidates import chosen, decode_candidates, product_candidates, ruled
from benchmarks.tune.compiling import compile_all, identity, jobs_of
from benchmarks.tune.products import ProductTimer
from benchmarks.tune.shapes import byte_keys, decode_keys, product_keys, read_models
from benchmarks.tune.timings import AnyPlan, Choice, Key, Task, Timings, choose_best, measure, merged
from tandem.engine_core.kernels.attention.paged_decode import choose_plan
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import ByteGemmPlan, DecodePlan, Plan
from tandem.engine_core.kernels.tiles.table import (
    BUCKETS,
    BYTE_BUCKETS,
    KERNEL_VERSION,
    NO_TABLE,
    ByteProductKey,
    DecodeKey,
    ProductKey,
)
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
    parser.add_argument("--byte-rows", type=int, nargs="+", default=[64, 256, 2048, 128], choices=BYTE_BUCKETS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, help="of bytes with bytes")
    parser.add_argument("--only", choices=("products", "bytes", "decode"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, help="the table; by default the packaged one of this GPU")
    parser.add_argument("--timings", type=Path, help="where times are kept; by default beside no table, in ~/.cache")
    return parser.parse_args(arguments)


def list_tasks(options: argparse.Namespace, gpu: GpuTraits) -> list[Task]:
    """List what to tune, each key once, what saves most first."""
    models = read_models(options.model)
    bare = GpuTraits(gpu.name, gpu.capability, gpu.multiprocessors, gpu.shared_memory, NO_TABLE)
    tasks: dict[Key, Task] = {}
    if options.only in (None, "decode"):
        for key in (key for model in models for key in decode_keys(model, DECODE_BATCHES, options.kv_bits)):
            given = key.head_dim, key.pairs, torch.bfloat16, KV_DTYPES[key.kv_bits]
            today, rule = (choose_plan(*given, one) for one in (gpu, bare))
            tasks[key] = Task(key, decode_candidates(key, today, rule), rule)
    for rows, byte_rows in zip_longest(options.rows, options.byte_rows):
        if options.only in (None, "products") and rows is not None:
            for product in (key for model in models for key in product_keys(model, [rows], options.bits)):
                plans = product_candidates(product, gpu)
                if plans and plans[0] == chosen(product, gpu):
                    tasks[product] = Task(product, plans, ruled(product, gpu))
        if _tunes_bytes(options) and byte_rows is not None:
            for one in (key for model in models for key in byte_keys(model, [byte_rows], options.formats)):
                if one.kind == "int8" or gpu.capability >= FP8_CAPABILITY:
                    tasks[one] = Task(one, byte_candidates(one, gpu), byte_chosen(one, bare))
    return list(tasks.values())


def _tunes_bytes(options: argparse.Namespace) -> bool:
    return options.only == "bytes" or (options.only is None and 8 in options.bits)


class Timer:
    """Timer of everything that is tuned."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.products = ProductTimer(gpu.pdl)
        self.bytes = ByteTimer(gpu)
        self.decode = DecodeTimer(gpu)

    def __call__(self, key: Key, plan: AnyPlan) -> float:
        """Return microseconds, infinite for a plan that does not run."""
        try:
            if isinstance(key, DecodeKey):
                return self.decode(key, cast("DecodePlan", plan))
            if isinstance(key, ByteProductKey):
                return self.bytes(key, cast("ByteGemmPlan | None", plan))
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
    elif isinstance(key, ByteProductKey):
        name = f"bytes {key.kind} by {key.scaling} {key.outputs}x{key.inputs} rows {key.rows}"
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
    print(
        f"{path}: {len(table.products)} products, {len(table.byte_products)} of bytes, "
        f"{len(table.decode)} kinds of attention{left}"
    )
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
