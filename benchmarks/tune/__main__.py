"""Tune kernel tiles on this GPU, and write its tile table.

    python -m benchmarks.tune --model FOLDER [--bits 16 8 4] [--kv-bits 16 8] [--minutes 4]
        [--only matmuls|w8a8|decode]

--bits are those of the weights to serve: by default only 16-bit matmuls and attention are tuned. Models are folders
with a config.json or names of benchmarks/shapes. Candidates are compiled in parallel, which needs no GPU, then timed in
CUDA graphs over more weights or keys and values than the L2 cache holds. Matmuls are timed within their layer, in the
engine's order, and a plan replaces the current one only if the whole layer is faster. Times are saved as they are
measured, and a run that was interrupted resumes. Decode attention comes first, then layers with the first of --rows,
W8A8 layers (with --bits 8) with the first of --w8a8-rows, and so on, for all models. Prints the times of the current
plans, of the rules' and of the best.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import version as torch_version

from benchmarks.measuring.processes import CUT_OFF
from benchmarks.tune.attention import KV_DTYPES, DecodeTimer
from benchmarks.tune.candidates import chosen, decode_candidates, matmul_candidates
from benchmarks.tune.compiling import Job, compile_all, identity, jobs_of
from benchmarks.tune.descent import Found, LayerTask, Round, incomplete, search
from benchmarks.tune.layers import LayerTimer
from benchmarks.tune.shapes import (
    BITS,
    EIGHT_BIT_FORMATS,
    LayerKey,
    decode_keys,
    layer_key,
    matmul_keys,
    read_models,
    runs_on,
)
from benchmarks.tune.timings import AnyPlan, Choice, Key, Task, Timings, choose_best, measure, merged
from benchmarks.tune.w8a8_candidates import w8a8_candidates, w8a8_chosen
from tandem.engine_core.kernels.attention.decode_plans import choose_plan
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.table import (
    BUCKETS,
    FEW_ROWS,
    KERNEL_VERSION,
    NO_TABLE,
    W8A8_BUCKETS,
    MatmulKey,
    TileTable,
    W8A8GemmKey,
)
from tandem.engine_core.kernels.tiles.table_file import file_name, packaged, write_table
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.runtime.device import read_gpu_traits

COMPILING = 0.55
"""Share of the time limit for compiling."""
DECODE_BATCHES = (8, 32, 64, 128, 256)
"""Rows of decode attention; one row of short context is in the L2 cache with any tile."""


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["1b", "8b"], help="1b, 8b, 4b, a shape's name or a folder")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[64, 32, 1, FEW_ROWS, 128, 16],
        choices=sorted((*BUCKETS, FEW_ROWS)),
        help=f"rows of decode steps; {FEW_ROWS} with 16 bits only",
    )
    parser.add_argument(
        "--bits",
        type=int,
        nargs="+",
        default=[16],
        choices=BITS,
        help="bits of a weight; 8 for FP8 and INT8",
    )
    parser.add_argument("--kv-bits", type=int, nargs="+", default=[16], choices=(16, 8), help="bits of keys and values")
    parser.add_argument(
        "--decode-rows",
        type=int,
        nargs="+",
        default=DECODE_BATCHES,
        choices=DECODE_BATCHES,
        help="rows of decode attention",
    )
    parser.add_argument(
        "--w8a8-rows",
        type=int,
        nargs="+",
        default=[64, 16, 32, 256, 2048, 128],
        choices=W8A8_BUCKETS,
        help="rows of W8A8 matmuls, which --bits 8 includes",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(EIGHT_BIT_FORMATS),
        choices=EIGHT_BIT_FORMATS,
        help="W8A8 formats: FP8 with scales per tensor, block or output channel, and INT8",
    )
    parser.add_argument(
        "--only",
        choices=("matmuls", "w8a8", "decode"),
        help="matmuls with 16-bit inputs, W8A8 matmuls, or decode attention",
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="time limit; the next run resumes")
    parser.add_argument("--out", type=Path, help="table to write (default: the packaged one of this GPU)")
    parser.add_argument("--timings", type=Path, help="file of all times (default: in ~/.cache/tandem-tune)")
    return parser


def list_tasks(options: argparse.Namespace, gpu: GpuTraits) -> list[Task]:
    """List the distinct shapes of decode attention to tune."""
    bare = replace(gpu, tiles=NO_TABLE)
    tasks: dict[Key, Task] = {}
    if options.only in (None, "decode"):
        models = read_models(options.model)
        for key in (key for model in models for key in decode_keys(model, options.decode_rows, options.kv_bits)):
            given = key.head_dim, key.pairs, torch.bfloat16, KV_DTYPES[key.kv_bits]
            today, rule = (choose_plan(*given, one) for one in (gpu, bare))
            tasks[key] = Task(key, decode_candidates(key, today, rule, gpu), rule)
    return list(tasks.values())


def list_layers(options: argparse.Namespace, gpu: GpuTraits) -> list[LayerTask]:
    """List the distinct layers to tune, the largest expected gain first."""
    models = read_models(options.model)
    tasks: dict[LayerKey, LayerTask] = {}
    for rows, w8a8_rows in zip_longest(options.rows, options.w8a8_rows):
        layers = (
            _layers(models, [BITS[bits] for bits in options.bits if bits == 16 or rows != FEW_ROWS], rows)
            if options.only in (None, "matmuls")
            else []
        )
        if options.only == "w8a8" or (options.only is None and 8 in options.bits):
            layers += _layers(models, [name for name in options.formats if runs_on(name, gpu)], w8a8_rows)
        for layer in layers:
            task = layer_task(layer, gpu)
            if task.candidates:
                tasks[layer] = task
    return list(tasks.values())


def _layers(models: list[ModelConfig], formats: list[str], rows: int | None) -> list[LayerKey]:
    return [] if rows is None else [layer_key(model, name, rows) for name in formats for model in models]


def layer_task(layer: LayerKey, gpu: GpuTraits) -> LayerTask:
    """Return the candidates of a layer's matmuls that have more than one."""
    candidates: dict[MatmulKey | W8A8GemmKey, list[Any]] = {}
    today: dict[MatmulKey | W8A8GemmKey, Any] = {}
    for key in matmul_keys(layer, gpu).values():
        is_w8a8 = isinstance(key, W8A8GemmKey)
        plans: list[Any] = w8a8_candidates(key, gpu) if is_w8a8 else matmul_candidates(key, gpu)  # type: ignore[arg-type]
        if len(plans) > 1:
            candidates[key] = plans
            today[key] = w8a8_chosen(key, gpu) if is_w8a8 else chosen(key, gpu)  # type: ignore[arg-type]
    return LayerTask(layer, candidates, today)


def guarded(time_plan: Callable[[Any, Any], float], key: object, plan: object) -> float:
    """Return the microseconds of a plan, infinite if it does not run.

    Raises RuntimeError if the CUDA context is lost.
    """
    try:
        return time_plan(key, plan)
    except Exception as error:
        if "CUDA error" in str(error):
            raise RuntimeError(f"{key} {plan} broke the device") from error
        torch.cuda.empty_cache()
        say(f"{key} {plan}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return float("inf")


def line_of(choice: Choice) -> str:
    """Format the result for one shape of decode attention."""
    key, rule = choice.task.key, choice.rule_us
    name = f"decode head_dim {key.head_dim} KV {key.kv_bits} bits pairs {key.pairs}"
    return f"{_times(name, choice.today_us, rule, choice.us)}  {choice.plan}"


def lines_of(found: Found, timings: Timings) -> list[str]:
    """Format a layer's times, and each plan that differs from the rule's."""
    task = found.task
    rules = {key: plans[0] for key, plans in task.candidates.items()}
    today, rule, best = (
        timings.of(Round(task.key, 0), tuple(plans.values())) for plans in (task.today, rules, found.plans)
    )
    if today is None or best is None:
        return [f"{task.key!s:44} not timed"]
    lines = [_times(str(task.key), today, rule, best)]
    for key, plan in found.plans.items():
        if plan != rules[key]:
            lines.append(f"    {_operation(key)} {key.outputs}x{key.inputs}: {plan or _without_plan(key)}")
    return lines


def _operation(key: MatmulKey | W8A8GemmKey) -> str:
    if isinstance(key, MatmulKey):
        return key.operation
    return f"{'gated ' if key.gated else ''}{key.kind} by {key.scaling}"


def _without_plan(key: MatmulKey | W8A8GemmKey) -> str:
    return "separate kernels" if isinstance(key, W8A8GemmKey) and key.gated else "library"


def _times(name: str, today: float, rule: float | None, best: float) -> str:
    against = "not timed" if rule is None else f"{rule:8.2f}"
    gain = 1 - best / today if today < float("inf") else 1.0
    return f"{name:44} today {today:8.2f} us  rule {against}  best {best:8.2f}  {gain:5.1%}"


def say(line: str) -> None:
    """Print a line and flush."""
    print(line, flush=True)


class Tuning:
    """One tuning run on a GPU, with a time limit."""

    def __init__(self, options: argparse.Namespace, gpu: GpuTraits, timings: Timings, began: float) -> None:
        self.gpu = gpu
        self.timings = timings
        self.tasks = list_tasks(options, gpu)
        self.layers = list_layers(options, gpu)
        self.seconds = 60 * options.minutes
        self.began = began

    def out_of_time(self) -> bool:
        """Return whether the time limit has passed."""
        return time.monotonic() - self.began > self.seconds

    def run(self) -> tuple[TileTable, bool]:
        """Compile and time; return the table, and whether everything was measured."""
        left = COMPILING * self.seconds - (time.monotonic() - self.began)
        jobs = jobs_of(self.tasks, incomplete(self.layers, self.timings), self.timings)
        compiled = compile_all(jobs, self.gpu, left, say) if jobs else {}

        def usable(job: Job) -> bool:
            return job.plan is None or identity(job) not in jobs or compiled.get(identity(job), "?") == ""

        with torch.inference_mode():
            decode_timer, layer_timer = DecodeTimer(self.gpu), LayerTimer(self.gpu)
            complete = measure(
                self.tasks,
                lambda key, plan: guarded(decode_timer, key, plan),
                self.timings,
                lambda key, plan: usable(Job(None, key, plan)),
                self.out_of_time,
            )
            searched = search(
                self.layers,
                self.timings,
                lambda layer, plans: guarded(layer_timer, layer, plans),
                lambda task, key, plan: usable(Job(task.key, key, plan)),
                self.out_of_time,
            )
        table = self._table(choose_best(self.tasks, self.timings), searched)
        return table, complete and jobs.keys() <= compiled.keys() and all(found.complete for found in searched)

    def _table(self, choices: list[Choice], searched: list[Found]) -> TileTable:
        plans: dict[Key, AnyPlan] = {}
        rules: dict[Key, AnyPlan] = {}
        for choice in choices:
            say(line_of(choice))
            plans[choice.task.key], rules[choice.task.key] = choice.plan, choice.task.rule
        for found in searched:
            for line in lines_of(found, self.timings):
                say(line)
            plans |= found.plans
            rules |= {key: listed[0] for key, listed in found.task.candidates.items()}
        return merged(self.gpu.tiles, self.gpu.name, plans, rules)


def main(arguments: list[str] | None = None) -> int:
    """Tune, print a line per key and write the table; return CUT_OFF if time ran out."""
    options = arguments_parser().parse_args(arguments)
    began = time.monotonic()
    gpu = read_gpu_traits()
    triton = sys.modules["triton"].__version__
    kept = Path.home() / ".cache" / "tandem-tune" / f"{file_name(gpu.name)}-{KERNEL_VERSION}-{triton}.jsonl"
    tuning = Tuning(options, gpu, Timings.resume(options.timings or kept), began)
    plans = sum(len(plans) for layer in tuning.layers for plans in layer.candidates.values())
    say(
        f"{gpu.name}: {len(tuning.layers)} layers with {plans} plans, {len(tuning.tasks)} attention shapes, "
        f"{len(tuning.timings.found)} times kept in {tuning.timings.path}"
    )
    table, complete = tuning.run()
    path = options.out or Path(str(packaged(gpu.name)))
    write_table(path, table, {"torch": str(torch_version.__version__), "triton": triton})
    left = "" if complete else "; time ran out, run again to resume"
    print(
        f"{path}: {len(table.products)} matmuls, {len(table.byte_products)} W8A8 matmuls, "
        f"{len(table.decode)} attention shapes{left}"
    )
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if complete else CUT_OFF


if __name__ == "__main__":
    sys.exit(main())
