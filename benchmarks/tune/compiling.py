"""Compilation of many plans at once, in processes of their own.

Compiling takes longer than timing. Triton keeps the code in its cache on disk, where the timing process finds it.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from benchmarks.tune.attention import compile_decode
from benchmarks.tune.byte_products import compile_byte_product
from benchmarks.tune.products import compile_key, compile_product
from benchmarks.tune.timings import AnyPlan, Key, Task, Timings
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import ByteGemmPlan, DecodePlan
from tandem.engine_core.kernels.tiles.table import NO_TABLE, ByteProductKey, DecodeKey, ProductKey

MOST_PROCESSES = 15
Identity = tuple[object, ...]


def identity(key: Key, plan: AnyPlan) -> Identity:
    """Return all that the code of a plan depends on."""
    if isinstance(key, ProductKey):
        assert not isinstance(plan, DecodePlan | ByteGemmPlan)
        return compile_key(key, plan)
    if isinstance(key, ByteProductKey):
        return key.kind, key.scaling, key.inputs, plan
    assert isinstance(key, DecodeKey) and isinstance(plan, DecodePlan)
    return key.head_dim, key.kv_bits, plan.tile, plan.splits > 1 or key.pairs < 256


def compile_one(key: Key, plan: AnyPlan, gpu: GpuTraits) -> str:
    """Compile a plan; return why that failed, or nothing."""
    try:
        if isinstance(key, ProductKey):
            assert not isinstance(plan, DecodePlan | ByteGemmPlan)
            compile_product(key, plan, gpu.pdl)
        elif isinstance(key, ByteProductKey):
            assert plan is None or isinstance(plan, ByteGemmPlan)
            compile_byte_product(key, plan, gpu)
        else:
            assert isinstance(plan, DecodePlan)
            compile_decode(key, plan, gpu)
    except Exception as error:
        # Triton raises errors of many classes for tiles that a GPU cannot hold.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def jobs_of(tasks: Iterable[Task], timings: Timings) -> dict[Identity, tuple[Key, AnyPlan]]:
    """List the codes to compile for plans without a time.

    Each is listed once, those of today's plans first.
    """
    jobs: dict[Identity, tuple[Key, AnyPlan]] = {}
    listed: Sequence[Task] = list(tasks)
    for first in (True, False):
        for task in listed:
            for plan in task.plans[:1] if first else task.plans[1:]:
                if timings.of(task.key, plan) is None:
                    jobs.setdefault(identity(task.key, plan), (task.key, plan))
    return jobs


def new_processes(count: int) -> Executor:
    """Start processes that have nothing of this one."""
    return ProcessPoolExecutor(count, get_context("spawn"))


def _outcome(future: Future[str]) -> str:
    """Return what a process answered, or why it did not."""
    error = future.exception()
    return future.result() if error is None else repr(error)


def compile_all(
    jobs: dict[Identity, tuple[Key, AnyPlan]],
    gpu: GpuTraits,
    seconds: float,
    report: Callable[[str], None],
    new_pool: Callable[[int], Executor] = new_processes,
) -> dict[Identity, str]:
    """Compile for at most some seconds.

    new_pool: starts as many processes as it is told. Return why each plan that was compiled failed; empty if it did
    not.
    """
    plain = GpuTraits(gpu.name, gpu.capability, gpu.multiprocessors, gpu.shared_memory, NO_TABLE)
    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1, len(jobs)))
    began = time.monotonic()
    pool = new_pool(processes)
    futures = {pool.submit(compile_one, key, plan, plain): code for code, (key, plan) in jobs.items()}
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
