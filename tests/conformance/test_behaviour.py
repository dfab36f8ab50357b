"""What signatures cannot pin: the fake device and the real one treat slots and results alike."""

from collections.abc import Callable

import pytest

from tandem.engine_core.contracts import Runtime
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


def news(seq_id: int, start: int, length: int, samples: bool) -> ScheduledSequence:
    tokens = pack_ids([3 + seq_id] * length)
    pages = (2 * seq_id, 2 * seq_id + 1) if start == 0 else ()
    return ScheduledSequence(seq_id, seq_id, start, length, samples, tokens=tokens, new_pages=pages)


def step(step_id: int, *rows: ScheduledSequence) -> StepPlan:
    return StepPlan.of(step_id, rows, tuple(NewSequence(r.seq_id, r.row, 5, GREEDY) for r in rows if r.start == 0))


@pytest.fixture(params=[fake, real], ids=["fake", "real"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    make: Callable[[], Runtime] = request.param
    return make()


def test_one_result_a_row_in_the_plans_order(runtime: Runtime) -> None:
    runtime.launch(0, step(1, news(1, 0, 3, False), news(2, 0, 5, True)))
    runtime.sample(0, None)
    first, second = runtime.collect(0)
    assert first == -1, "a row that does not sample has no token"
    assert second >= 0


def test_a_step_without_samples_goes_the_same_way(runtime: Runtime) -> None:
    runtime.launch(0, step(1, news(1, 0, 3, False)))
    runtime.sample(0, None)
    assert runtime.collect(0) == [-1]
    runtime.launch(0, step(2, news(1, 3, 2, True)))
    runtime.sample(0, None)
    assert runtime.collect(0)[0] >= 0


def test_the_other_slot_may_run_ahead(runtime: Runtime) -> None:
    runtime.launch(0, step(1, news(1, 0, 5, True)))
    runtime.sample(0, None)
    runtime.launch(1, step(2, ScheduledSequence(1, 1, 5, 1, True)))
    runtime.sample(1, None)
    ahead = runtime.collect(0) + runtime.collect(1)
    assert all(token >= 0 for token in ahead)


def test_a_slot_holds_one_step(runtime: Runtime) -> None:
    runtime.launch(0, step(1, news(1, 0, 5, True)))
    with pytest.raises(AssertionError):
        runtime.launch(0, step(2, news(2, 0, 5, True)))


def test_nothing_comes_out_of_an_empty_slot(runtime: Runtime) -> None:
    with pytest.raises((AssertionError, KeyError)):
        runtime.collect(1)
