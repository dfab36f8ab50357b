"""Compile many plans in parallel processes.

Compiling takes longer than timing. Triton caches the code on disk, where the timing process finds it. The processes
compile what the engine would launch for a plan, and need no GPU.
"""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple, cast

from benchmarks.tune.attention import launch_decode
from benchmarks.tune.descent import LayerTask
from benchmarks.tune.layers import run_matmul
from benchmarks.tune.shapes import LayerKey, matmul_keys
from benchmarks.tune.timings import AnyPlan, Key, Task, Timings
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Plan, SplitKPlan, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import NO_TABLE, DecodeKey, W8A8GemmKey

MAX_PROCESSES = 15
Identity = tuple[object, ...]


class Job(NamedTuple):
    """One plan to compile; for a matmul with its layer."""

    layer: LayerKey | None
    key: Key
    plan: AnyPlan


def identity(job: Job) -> Identity:
    """Return everything that a plan's code depends on, which excludes the number of outputs."""
    layer, key, plan = job
    if isinstance(key, DecodeKey):
        assert isinstance(plan, DecodePlan)
        return key.head_dim, key.kv_bits, plan.tile, plan.early, plan.splits > 1 or key.pairs < 256
    assert layer is not None
    if isinstance(key, W8A8GemmKey):
        return layer.format, key.inputs, key.gated, plan
    rows = max(16, key.rows) if isinstance(plan, SplitKPlan) else key.rows
    return layer.format, key.operation, key.bits, key.inputs, rows, plan


def compile_one(job: Job, gpu: GpuTraits) -> str:
    """Compile a plan; return the error, empty on success."""
    from benchmarks.measuring.offline_compiler import compiling_only

    try:
        with compiling_only(gpu.capability[0] * 10 + gpu.capability[1]) as compiled:
            _launch(job, gpu)
    except Exception as error:
        # Triton raises many kinds of errors for tiles that exceed a GPU's resources.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    most = max((code.metadata.shared for code in compiled), default=0)
    if not compiled:
        return "nothing was launched"
    return f"{most} bytes of shared memory, {gpu.shared_memory} available" if most > gpu.shared_memory else ""


def _launch(job: Job, gpu: GpuTraits) -> None:
    """Launch a plan's kernels with arguments on the CPU."""
    layer, key, plan = job
    if isinstance(key, DecodeKey):
        assert isinstance(plan, DecodePlan)
        launch_decode(key, plan, gpu, "cpu")
        return
    assert layer is not None and not isinstance(plan, DecodePlan)
    names = {found: name for name, found in matmul_keys(layer, gpu).items()}
    run_matmul(layer, names[key], {key: cast("Plan | W8A8GemmPlan", plan)}, gpu, "cpu")


def jobs_of(tasks: Iterable[Task], layers: Iterable[LayerTask], timings: Timings) -> dict[Identity, Job]:
    """List the distinct plans to compile, the first candidates first.

    For attention, plans without a time; for layers, all but the library.
    """
    lists = [[Job(None, task.key, plan) for plan in task.plans if timings.of(task.key, plan) is None] for task in tasks]
    lists += [[Job(task.key, key, plan) for plan in plans] for task in layers for key, plans in task.candidates.items()]
    found: dict[Identity, Job] = {}
    for job in (*(job for jobs in lists for job in jobs[:1]), *(job for jobs in lists for job in jobs[1:])):
        if job.plan is not None:
            found.setdefault(identity(job), job)
    return found


def new_processes(count: int) -> Executor:
    """Start fresh processes, using spawn."""
    return ProcessPoolExecutor(count, get_context("spawn"))


def _outcome(future: Future[str]) -> str:
    """Return the result of a process, or its error."""
    error = future.exception()
    return future.result() if error is None else repr(error)


def compile_all(
    jobs: dict[Identity, Job],
    gpu: GpuTraits,
    seconds: float,
    report: Callable[[str], None],
    new_pool: Callable[[int], Executor] = new_processes,
) -> dict[Identity, str]:
    """Compile for at most `seconds`; return the error of each compiled plan, empty on success.

    new_pool: starts a number of processes.
    """
    plain = replace(gpu, tiles=NO_TABLE)
    processes = max(1, min(MAX_PROCESSES, (os.cpu_count() or 2) - 1, len(jobs)))
    began = time.monotonic()
    pool = new_pool(processes)
    futures = {pool.submit(compile_one, job, plain): code for code, job in jobs.items()}
    done, _ = wait(futures, timeout=max(0.0, seconds))
    pool.shutdown(wait=True, cancel_futures=True)
    done |= {future for future in futures if future.done() and not future.cancelled()}
    found = {futures[future]: _outcome(future) for future in done}
    reasons = [reason for reason in found.values() if reason]
    failed = len(reasons)
    report(
        f"compiled {len(found) - failed} of {len(jobs)} kernels in {time.monotonic() - began:.0f} s with {processes} "
        f"processes; {failed} do not run on this GPU{', such as ' + reasons[0] if reasons else ''}"
    )
    return found
