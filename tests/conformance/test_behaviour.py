"""Behaviour that signatures cannot pin: the fake runtime and the real one treat slots and results alike."""

from collections.abc import Callable

import pytest

from tandem.engine_core.contracts import Runtime, StepResult
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.protocol.codec import pack_ids
from tandem.protocol.params import SamplingParams
from tests.fakes.runtime import FakeRuntime
from tests.support.tiny_llama import Shape, build_runtime, random_model

GREEDY = SamplingParams(8, temperature=0.0)


def real() -> Runtime:
    return build_runtime(random_model(), Shape())


def fake() -> Runtime:
    return FakeRuntime(4, 65, 4)


def new_row(seq_id: int, start: int, length: int, samples: bool) -> ScheduledSequence:
    tokens = pack_ids([3 + seq_id] * length)
    pages = (2 * seq_id, 2 * seq_id + 1) if start == 0 else ()
    return ScheduledSequence(seq_id, seq_id, start, length, samples, tokens=tokens, new_pages=pages)


def step(step_id: int, *rows: ScheduledSequence) -> StepPlan:
    return StepPlan.of(step_id, rows, admitted(*[row.seq_id for row in rows if row.start == 0]))


def admitted(*seq_ids: int) -> tuple[NewSequence, ...]:
    return tuple(NewSequence(seq_id, seq_id, 5, GREEDY) for seq_id in seq_ids)


@pytest.fixture(params=[fake, real], ids=["fake", "real"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    make: Callable[[], Runtime] = request.param
    return make()


def test_counts_are_of_every_row_in_the_plans_order(runtime: Runtime) -> None:
    runtime.launch(0, step(1, new_row(1, 0, 3, False), new_row(2, 0, 5, True)))
    runtime.sample(0, None)
    result = runtime.collect(0)
    assert result.counts == [0, 1], "a row that does not sample has no token"
    (token,) = result.tokens
    assert token >= 0
    assert [list(run) for run in result.runs()] == [[], [token]]


def test_step_without_samples_is_collected_like_any_other(runtime: Runtime) -> None:
    runtime.launch(0, step(1, new_row(1, 0, 3, False)))
    runtime.sample(0, None)
    assert runtime.collect(0) == StepResult([0], [])
    runtime.launch(0, step(2, new_row(1, 3, 2, True)))
    runtime.sample(0, None)
    result = runtime.collect(0)
    assert result.counts == [1]
    assert result.tokens[0] >= 0


def test_other_slot_may_run_ahead(runtime: Runtime) -> None:
    runtime.launch(0, step(1, new_row(1, 0, 5, True)))
    runtime.sample(0, None)
    runtime.launch(1, step(2, ScheduledSequence(1, 1, 5, 1, True)))
    runtime.sample(1, None)
    ahead = [runtime.collect(slot) for slot in (0, 1)]
    assert all(result.counts == [1] and result.tokens[0] >= 0 for result in ahead)


def test_log_probabilities_belong_to_the_slots_own_step(runtime: Runtime) -> None:
    """Steps of other sizes were collected meanwhile, and the next step in the slot wants none."""
    width = 4 * (1 + 2 * 2)
    plans = [
        StepPlan.of(1, (new_row(1, 0, 5, True), new_row(2, 0, 5, True)), admitted(1, 2), logprobs=2),
        StepPlan.of(2, (ScheduledSequence(1, 1, 5),), (), logprobs=2),
    ]
    for slot, plan in enumerate(plans):
        runtime.launch(slot, plan)
        runtime.sample(slot, None)
    results = [runtime.collect(slot) for slot in (0, 1)]
    for result, rows in zip(results, (2, 1), strict=True):
        assert result.logprobs is not None
        assert (result.logprobs.top, len(result.logprobs.records)) == (2, rows * width)
    runtime.launch(0, step(3, ScheduledSequence(1, 1, 6)))
    runtime.sample(0, None)
    assert runtime.collect(0).logprobs is None


def test_slot_holds_one_step_at_a_time(runtime: Runtime) -> None:
    runtime.launch(0, step(1, new_row(1, 0, 5, True)))
    with pytest.raises(AssertionError):
        runtime.launch(0, step(2, new_row(2, 0, 5, True)))


def test_collecting_an_empty_slot_raises(runtime: Runtime) -> None:
    with pytest.raises((AssertionError, KeyError)):
        runtime.collect(1)
