"""I3 and I6: what `collect` waits for is recorded by the step itself, whatever the step holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.device import TIMING_INTERVAL, HostInstant, StepClock
from tandem.protocol.params import SamplingParams
from tests.support.tiny_llama import Shape, TinyEngine


class CountingEvent:
    """Notes how often it was recorded, and what a wait found."""

    def __init__(self) -> None:
        self.records = 0

    def record(self) -> None:
        self.records += 1

    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


def named_marks(order: list[str]) -> Callable[[], HostInstant]:
    """Return a maker of a clock's marks, which note their names when they are recorded."""
    names = iter(["started", "ended", "next", "paused", "resumed"])

    class Mark(HostInstant):
        def __init__(self) -> None:
            super().__init__()
            self.name = next(names)

        def record(self) -> None:
            order.append(self.name)
            super().record()

    return Mark


def test_a_step_that_is_timed_has_ended_when_its_results_are_waited_for(model: Decoder) -> None:
    """The mark of a step's end comes before the event behind which its results are copied."""
    engine = TinyEngine(model, Shape())
    runtime, order = engine.runtime, list[str]()

    class Done(CountingEvent):
        def record(self) -> None:
            order.append("done")

    for slot in runtime.slots:
        slot.sampling_done = Done()
    runtime.clock = StepClock(named_marks(order))
    engine.generate([list(range(2, 12))], [SamplingParams(20, temperature=0.0)])
    begun = [number for number, what in enumerate(order) if what == "started"]
    assert len(begun) >= 2
    assert [order[number : number + 3] for number in begun] == [["started", "ended", "done"]] * len(begun)


def test_the_clock_of_a_step_starts_behind_all_that_the_host_prepares(model: Decoder) -> None:
    """Time in which the device waits for the host is a gap, and none of the step's own."""
    engine = TinyEngine(model, Shape())
    runtime, order = engine.runtime, list[str]()

    class Noting(HostInstant):
        def record(self) -> None:
            order.append("instant")
            super().record()

    runtime.clock = StepClock(Noting)
    planners = [slot.attention for slot in runtime.slots]
    plans = [planner.plan for planner in planners]
    forward = runtime.model.forward

    def note_plan(number: int, *given: Any) -> Any:
        order.append("plan")
        return plans[number](*given)

    def note_forward(*given: Any) -> Any:
        order.append("forward")
        return forward(*given)

    for number, planner in enumerate(planners):
        planner.plan = partial(note_plan, number)  # type: ignore[method-assign]
    with patch.object(type(runtime.model), "forward", staticmethod(note_forward)):
        engine.generate([list(range(2, 12))], [SamplingParams(20, temperature=0.0)])
    started = [
        number for number, what in enumerate(order) if order[number - 1 : number + 2] == ["plan", what, "forward"]
    ]
    assert len(started) >= 2
    assert all(order[number] == "instant" for number in started), order


class Stream:
    """Stream of a device in simulated time; an instant marks where it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def instant(self) -> HostInstant:
        return StreamInstant(self)


class StreamInstant(HostInstant):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def record(self) -> None:
        self.seconds = self.stream.now


@pytest.mark.parametrize("waits", [None, 0.0, 0.047])
def test_the_wait_for_masks_is_none_of_a_steps_time(waits: float | None) -> None:
    stream = Stream()
    clock = StepClock(stream.instant)
    clock.begin(TIMING_INTERVAL, follows=True)
    stream.now += 0.003
    if waits is not None:
        clock.pause(TIMING_INTERVAL)
        stream.now += waits
        clock.resume(TIMING_INTERVAL)
    stream.now += 0.001
    clock.end(TIMING_INTERVAL)
    stream.now += 0.002
    clock.begin(TIMING_INTERVAL + 1, follows=True)
    assert clock.read(TIMING_INTERVAL) == pytest.approx(4.0)
    assert clock.read(TIMING_INTERVAL + 1) == 0.0
    assert (clock.times.busy, clock.times.idle) == (pytest.approx(0.004), pytest.approx(0.002 + (waits or 0.0)))


def test_a_step_after_one_that_waited_is_timed_as_a_whole() -> None:
    stream = Stream()
    clock = StepClock(stream.instant)
    clock.begin(TIMING_INTERVAL, follows=True)
    clock.pause(TIMING_INTERVAL)
    clock.resume(TIMING_INTERVAL)
    clock.end(TIMING_INTERVAL)
    clock.pause(TIMING_INTERVAL + 1)
    clock.begin(2 * TIMING_INTERVAL, follows=True)
    stream.now += 0.005
    clock.end(2 * TIMING_INTERVAL)
    assert clock.read(2 * TIMING_INTERVAL) == pytest.approx(5.0)


def test_a_step_with_masks_is_marked_before_it_waits_and_once_they_are_on_the_device(model: Decoder) -> None:
    engine = TinyEngine(model, Shape())
    runtime, order = engine.runtime, list[str]()
    runtime.clock = StepClock(named_marks(order))
    fill, sample = runtime.filler.fill, runtime.sampler.sample

    def note_fill(*given: Any) -> None:
        order.append("filled")
        fill(*given)

    def note_sample(batch: SamplingBatch) -> None:
        order.append("sampled")
        sample(batch)

    with patch.object(runtime.filler, "fill", note_fill), patch.object(runtime.sampler, "sample", note_sample):
        engine.generate([list(range(2, 12))], [SamplingParams(20, temperature=0.0)], constrained=[0])
    begun = [number for number, what in enumerate(order) if what == "started"]
    assert len(begun) >= 2
    timed = [[what for what in order[number : number + 7] if what != "next"] for number in begun]
    assert all(one[:6] == ["started", "paused", "filled", "resumed", "sampled", "ended"] for one in timed), order


def test_masks_are_copied_during_the_forward_pass_and_sampling_waits_for_them(model: Decoder) -> None:
    engine = TinyEngine(model, Shape())
    runtime, order = engine.runtime, list[str]()

    @contextmanager
    def copy() -> Iterator[None]:
        order.append("copy stream")
        yield
        order.append("compute stream")

    class Copied(CountingEvent):
        def record(self) -> None:
            order.append("recorded")

        def wait(self) -> None:
            order.append("waited for")

    for slot in runtime.slots:
        slot.masks_done = Copied()
    sample = runtime.sampler.sample

    def note_sample(batch: SamplingBatch) -> None:
        order.append("sampled")
        sample(batch)

    with patch.object(runtime.device, "copy", copy), patch.object(runtime.sampler, "sample", note_sample):
        engine.generate([list(range(2, 12))], [SamplingParams(5, temperature=0.0)], constrained=[0])
    steps = " ".join(order).split("sampled")[:-1]
    masks = "copy stream recorded compute stream waited for"
    assert len(steps) >= 5
    assert all(step.strip().endswith(masks) for step in steps), order


def test_every_step_is_waited_for_even_if_it_samples_nothing(model: Decoder) -> None:
    """A step of prompt chunks has no tokens; its slot's buffers are still read until the device is done with it."""
    engine = TinyEngine(model, Shape(chunk=4, step_tokens=8))
    runtime = engine.runtime
    events = []
    for slot in runtime.slots:
        slot.sampling_done, slot.copy_done = CountingEvent(), CountingEvent()
        events.append(slot.copy_done)
    launched, silent = [0] * len(events), 0
    launch, collect = runtime.launch, runtime.collect

    def count_launch(slot: int, plan: StepPlan) -> None:
        nonlocal silent
        launched[slot] += 1
        silent += not any(row.samples for row in plan.rows)
        launch(slot, plan)

    def check_collect(slot: int) -> list[int]:
        assert events[slot].records == launched[slot], "the step before would be waited for, not this one"
        return collect(slot)

    runtime.launch, runtime.collect = count_launch, check_collect  # type: ignore[method-assign]
    engine.generate([list(range(2, 42))] * 2, [SamplingParams(5, temperature=0.0)] * 2)
    assert silent >= 3, "prompts of ten chunks make steps without a sample"
