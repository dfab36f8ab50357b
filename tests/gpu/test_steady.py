"""I7: the launch path neither waits for the device nor allocates driver memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.gpu_traffic import KINDS, requests
from tests.support.launch_guards import PinnedCopies, around_launches, sync_is_an_error
from tests.support.plan_recording import constraining, drive, recorded, runtime_of

pytestmark = pytest.mark.gpu

VOCAB, STEADY_STEPS, PROFILED_STEPS = 4096, 300, 50
WAITS = {
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMemset", "cudaMemcpyToSymbol"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"),
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cuMemAlloc_v2", "cuMemFree_v2"),
}
"""Calls that (may) wait for the device."""
MODES = {
    "greedy": SamplingParams(900, temperature=0.0, ignore_eos=True),
    "plain": SamplingParams(900, seed=3, ignore_eos=True),
    "full": SamplingParams(900, temperature=0.9, top_p=0.9, top_k=20, repetition_penalty=1.1, ignore_eos=True, seed=3),
}


@pytest.fixture(scope="module")
def driven() -> DrivenEngine:
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        pipeline="on",
        max_rows=12,
        max_step_tokens=128,
        prefill_chunk=48,
        max_len=1024,
        kv_tokens=12288,
        graph_rows="1,2,4,8",
    )
    driven = DrivenEngine.build(options)
    constraining(driven.engine)
    return driven


@pytest.fixture(scope="module")
def runtime(driven: DrivenEngine) -> TorchRuntime:
    return runtime_of(driven)


@contextmanager
def steady(driven: DrivenEngine, params: SamplingParams, rows: int = 7) -> Iterator[None]:
    """Rows that only decode, until the end of the block."""
    engine, rng = driven.engine, Random(rows)
    ids = [driven.submit([rng.randrange(3, VOCAB) for _ in range(20)], params) for _ in range(rows)]
    while any(len(driven.mailbox.received[CLIENT, number]) < 8 for number in ids):
        engine.tick()
    yield
    assert not any((CLIENT, number) in driven.mailbox.outcomes for number in ids), "it was not steady to the end"
    driven.mailbox.inbox.append((CLIENT, Abort(ids)))
    engine.tick()
    while engine.pipeline.in_flight:
        engine.tick()


def test_guards_refuse_waits_and_pageable_copies() -> None:
    device = torch.zeros(4, 4, device="cuda")
    pinned = torch.zeros(4, 4, pin_memory=True)
    with PinnedCopies() as guard:
        device.copy_(pinned, non_blocking=True)
        pinned.to("cuda", non_blocking=True)
        device += 1
    assert guard.copies == 2
    for source in (torch.ones(4, 4), pinned[:, :2]):
        with PinnedCopies(), pytest.raises(AssertionError, match="host memory"):
            device[:, : source.shape[1]].copy_(source, non_blocking=True)
        with PinnedCopies(), pytest.raises(AssertionError, match="host memory"):
            source.to("cuda", non_blocking=True)
    torch.cuda.synchronize()


@pytest.mark.parametrize("guard", [sync_is_an_error, PinnedCopies])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_steps_neither_wait_nor_copy_from_pageable_memory(
    driven: DrivenEngine, runtime: TorchRuntime, kind: str, guard: object
) -> None:
    rng = Random(5)
    kinds = KINDS if kind == "full" else (kind,)
    asked = requests(16, kinds, rng, longest=90, most=40, vocab=VOCAB)
    with around_launches(runtime, guard), recorded(runtime) as seen:  # type: ignore[arg-type]
        drive(driven, asked, rng, aborts=0.02, constrained=9 if kind == "full" else 0)
    lengths = [[row.length for row in plan.rows] for plan in seen.plans]
    mixed = sum(1 in each and max(each) > 1 for each in lengths)
    print(f"\n{kind}: {len(seen.plans)} steps, {mixed} mixed, {sum(seen.graphed)} from graphs")
    assert mixed > 3 and sum(seen.graphed) > 3


@pytest.mark.parametrize("mode", list(MODES))
def test_steady_steps_allocate_nothing(driven: DrivenEngine, runtime: TorchRuntime, mode: str) -> None:
    """Neither the driver nor torch's own pool allocates memory."""
    engine = driven.engine
    with steady(driven, MODES[mode]), around_launches(runtime, sync_is_an_error):
        runtime.synchronize()
        before, steps = torch.cuda.memory_stats(), engine.stats.steps_committed
        while engine.stats.steps_committed < steps + STEADY_STEPS:
            engine.tick()
        after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_device_free", "allocation.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], f"{name} went from {before[name]} to {after[name]}"
    print(f"\n{mode}: num_device_alloc stays {after['num_device_alloc']} over {STEADY_STEPS} steps")


def test_a_profile_shows_no_wait(driven: DrivenEngine) -> None:
    """Except for the wait for a step's own event, no call waits in a steady tick."""
    engine = driven.engine
    # Some versions of torch warn that events are cleared between cycles, unless these are to be kept.
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
    with steady(driven, MODES["full"]), profiler as found:
        engine.tick()
        for _ in range(PROFILED_STEPS):
            with record_function("steady tick"):
                engine.tick()
    events = found.events()
    assert events is not None
    ticks = [event.time_range for event in events if event.name == "steady tick" and "CPU" in str(event.device_type)]
    assert len(ticks) == PROFILED_STEPS
    calls: Counter[str] = Counter()
    for event in events:
        inside = any(tick.start <= event.time_range.start <= tick.end for tick in ticks)
        if inside and event.name.startswith("cu") and "CPU" in str(event.device_type):
            calls[event.name] += 1
    print(f"\nin {PROFILED_STEPS} ticks: {dict(calls.most_common())}")
    # Forward pass and sampling; before those of a step that brings pages, the update of the page table.
    assert 2 * PROFILED_STEPS < calls["cudaGraphLaunch"] < 3 * PROFILED_STEPS, "the profile saw the launches"
    assert not WAITS & calls.keys()
    assert calls["cudaEventSynchronize"] <= PROFILED_STEPS
