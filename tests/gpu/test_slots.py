"""Hand-written steps: memory that a padded graph may touch, and the lifetime of a slot."""

import time

import pytest
import torch

from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.codec import pack_ids
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.plan_recording import reset, runtime_of, state

pytestmark = pytest.mark.gpu

PAGE_SIZE, ROWS = 16, 8
SLEEP_CYCLES = 200_000_000
"""Some 100 ms of the device's clock."""
GREEDY = SamplingParams(64, temperature=0.0)
EVERYTHING = SamplingParams(64, top_k=9, top_p=0.9, repetition_penalty=1.2, seed=3)


@pytest.fixture(scope="module")
def shared() -> TorchRuntime:
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        pipeline="on",
        max_rows=ROWS,
        max_step_tokens=256,
        max_len=256,
        kv_tokens=2048,
        graph_rows="1,2,4,8",
    )
    return runtime_of(DrivenEngine.build(options))


@pytest.fixture
def runtime(shared: TorchRuntime) -> TorchRuntime:
    reset(shared)
    return shared


def pages(row: int) -> tuple[int, ...]:
    """Two pages per row, not in the order of the rows."""
    place = 1 + (row * 5) % ROWS
    return (place, place + ROWS)


def prompt(row: int, length: int) -> list[int]:
    return [(row * 97 + index * 31) % 4000 + 5 for index in range(length)]


def prefill(step_id: int, rows: list[int], length: int, params: SamplingParams, samples: bool = True) -> StepPlan:
    work = tuple(
        ScheduledSequence(row, row, 0, length, samples, tokens=pack_ids(prompt(row, length)), new_pages=pages(row))
        for row in rows
    )
    return StepPlan.of(step_id, work, tuple(NewSequence(row, row, length, params) for row in rows))


def run(runtime: TorchRuntime, slot: int, plan: StepPlan) -> list[int]:
    runtime.launch(slot, plan)
    runtime.sample(slot, None)
    return runtime.collect(slot).tokens


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "full"])
@pytest.mark.parametrize("live", [[2], [7, 1, 4], [3, 8, 1, 6, 2]])
def test_padding_touches_no_other_row(runtime: TorchRuntime, live: list[int], params: SamplingParams) -> None:
    """Steps of 1, 3 and 5 rows in graphs of 1, 4 and 8: nothing changes but one token and one slot per live row."""
    length = 11
    run(runtime, 0, prefill(1, list(range(1, ROWS + 1)), length, params))
    before = state(runtime)
    decode = StepPlan.of(2, tuple(ScheduledSequence(row, row, length, 1, True) for row in live))
    assert decode.is_unconstrained_decode
    runtime.launch(1, decode)
    assert runtime.slots[1].graphs is not None
    runtime.sample(1, None)
    tokens = runtime.collect(1).tokens
    after = state(runtime)
    for name, old in before.items():
        changed = (old != after[name]).reshape(len(old), -1).any(1).nonzero().flatten().tolist()
        if name == "tokens":
            assert set(changed) <= {row - 1 for row in live}
            places = (old != after[name]).nonzero()
            assert set(places[:, 1].tolist()) <= {length + 1}
            assert [int(after[name][row - 1, length + 1]) for row in live] == tokens
        elif name == "lengths":
            assert after[name].tolist() == [length + 1 + (row in live) for row in range(1, ROWS + 1)]
        elif name.startswith(("keys", "values")):
            # The reserved page is not part of the state: index 0 here is the first slot of page 1.
            assert set(changed) == {(pages(row)[0] - 1) * PAGE_SIZE + length for row in live}, name
        else:
            assert not changed, name


def test_a_step_that_samples_nothing_holds_its_slot(runtime: TorchRuntime) -> None:
    """I6: its inputs are read from pinned memory until it has run, so `collect` may not return before."""
    length = 16
    torch.cuda._sleep(SLEEP_CYCLES)
    slots = {0: [1, 2], 1: [3, 4]}
    for slot, rows in slots.items():
        runtime.launch(slot, prefill(1 + slot, rows, length, GREEDY, samples=False))
        runtime.sample(slot, None)
    for slot, rows in slots.items():
        runtime.collect(slot)
        run(runtime, slot, prefill(3 + slot, [rows[0] + 4, rows[1] + 4], length, GREEDY))
    found = state(runtime)["tokens"][:, :length].tolist()
    wrong = [row for row in range(1, ROWS + 1) if found[row - 1] != prompt(row, length)]
    assert not wrong, f"the prompts of rows {wrong} were overwritten on the host before the device had read them"


def test_inputs_reach_the_device_while_the_step_before_runs(runtime: TorchRuntime) -> None:
    torch.cuda._sleep(SLEEP_CYCLES)
    before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    before.record()
    runtime.launch(0, prefill(1, [1], 16, GREEDY))
    slot = runtime.slots[0]
    assert slot.packed is not None
    slot.uploaded.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        arrived = slot.device_inputs[: slot.packed.total].cpu()
    assert not before.query(), "the copy waited for what the compute stream ran"
    assert (arrived.numpy() == slot.inputs_view[: slot.packed.total]).all()
    runtime.sample(0, None)
    assert len(runtime.collect(0).tokens) == 1


def test_clock_counts_a_step_that_samples_nothing_once(runtime: TorchRuntime) -> None:
    """Busy time does not shrink, and no more time is counted than has passed."""
    assert runtime.clock is not None
    for row in (1, 2):
        run(runtime, 0, prefill(7 + row - 2, [row], 16, GREEDY))
    times = runtime.device_times()
    busy, idle, started = times.busy, times.idle, time.monotonic()
    run(runtime, 0, prefill(8, [3], 16, GREEDY, samples=False))
    run(runtime, 1, prefill(9, [4], 16, GREEDY))
    runtime.synchronize()
    passed = time.monotonic() - started
    times = runtime.device_times()
    assert times.busy >= busy, f"{times.busy - busy} s of work"
    assert times.busy - busy + times.idle - idle <= passed, f"{times} after {busy} and {idle}, {passed} s later"
