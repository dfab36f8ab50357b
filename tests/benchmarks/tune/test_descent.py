"""Plans are chosen by the time of the whole layer, and a run that was cut off takes the same way again."""

from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest

from benchmarks.tune.descent import Descent, Found, LayerTask, LayerTimes, OutOfTimeError, Round, incomplete, search
from benchmarks.tune.layers import LayerPlans
from benchmarks.tune.shapes import LayerKey
from benchmarks.tune.timings import Timings
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan
from tandem.engine_core.kernels.tiles.table import MatmulKey

LAYER = LayerKey("4 bits", 16, 4096, 4096, 1024, 14336, 128256)
UP = MatmulKey("gated", 4, 14336, 4096, 16)
DOWN = MatmulKey("product", 4, 4096, 14336, 16)
ONE, TWO, FOUR, EIGHT = (SplitKPlan(64, 128, split) for split in (1, 2, 4, 8))
RULES: LayerPlans = {UP: ONE, DOWN: FOUR}
TASK = LayerTask(LAYER, {UP: [ONE, TWO], DOWN: [FOUR, EIGHT, TWO]}, RULES)
Cost = Callable[[LayerPlans], float]


def alone(plans: LayerPlans) -> float:
    """Each product takes its own time: two parts of the first save 10 us, eight of the second 20."""
    return {ONE: 60.0, TWO: 50.0}[plans[UP]] + {FOUR: 40.0, EIGHT: 20.0, TWO: 45.0}[plans[DOWN]]


def crowded(plans: LayerPlans) -> float:
    """Two parts of the first product pay only beside eight of the second."""
    return {(ONE, FOUR): 100.0, (TWO, FOUR): 110.0, (ONE, EIGHT): 80.0, (TWO, EIGHT): 70.0}.get(
        (plans[UP], plans[DOWN]), 150.0
    )


class Measured:
    """Made-up times that note what was measured."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.seen: list[LayerPlans] = []

    def __call__(self, _layer: LayerKey, plans: LayerPlans) -> float:
        self.seen.append(dict(plans))
        return self.cost(plans)


def found_by(
    measured: Measured, timings: Timings, left: int = 1000, tasks: tuple[LayerTask, ...] = (TASK,),
    unusable: tuple[SplitKPlan, ...] = (),
) -> list[Found]:  # fmt: skip
    """Search with made-up times, for as many measurements as are left."""
    clock = chain(repeat(False, left), repeat(True))
    return search(tasks, timings, measured, lambda _task, _key, plan: plan not in unusable, lambda: next(clock))


@pytest.fixture
def timings(tmp_path: Path) -> Timings:
    return Timings(tmp_path / "t.jsonl")


def test_each_product_gets_what_makes_the_layer_fastest(timings: Timings) -> None:
    (found,) = found_by(Measured(alone), timings)
    assert found == Found(TASK, {UP: TWO, DOWN: EIGHT}, True)


def test_a_product_is_tried_again_beside_the_plans_of_the_others(timings: Timings) -> None:
    (found,) = found_by(Measured(crowded), timings)
    assert found.plans == {UP: TWO, DOWN: EIGHT}


def test_a_plan_that_is_fast_once_is_not_taken(timings: Timings) -> None:
    """The first time of eight parts is short by accident, as the three that follow it show."""
    lucky = [10.0]

    def cost(plans: LayerPlans) -> float:
        return lucky.pop() if plans[DOWN] == EIGHT and lucky else 100.0

    (found,) = found_by(Measured(cost), timings)
    assert found.plans == RULES
    assert [timings.of(Round(LAYER, number), (ONE, EIGHT)) for number in range(4)] == [10.0, 100.0, 100.0, 100.0]


def test_a_small_gain_changes_nothing(timings: Timings) -> None:
    (found,) = found_by(Measured(lambda plans: 99.6 if plans[DOWN] == EIGHT else 100.0), timings)
    assert found.plans == RULES


def test_a_plan_that_was_not_compiled_is_left_for_a_later_run(timings: Timings) -> None:
    measured = Measured(alone)
    (found,) = found_by(measured, timings, unusable=(EIGHT,))
    assert found.plans == {UP: TWO, DOWN: FOUR}
    assert all(plans[DOWN] != EIGHT for plans in measured.seen)
    assert incomplete([TASK], timings) == [TASK]


def test_a_run_out_of_time_goes_on_where_it_stopped(timings: Timings) -> None:
    whole = Measured(crowded)
    found_by(whole, Timings(timings.path.with_name("whole")))
    for left in range(len(whole.seen)):
        timings.path.unlink(missing_ok=True)
        first, second = Measured(crowded), Measured(crowded)
        (cut,) = found_by(first, Timings.resume(timings.path), left)
        assert not cut.complete
        assert incomplete([TASK], Timings.resume(timings.path)) == [TASK]
        # What was taken so far is in the table of the second run.
        again = LayerTask(LAYER, TASK.candidates, cut.plans)
        (found,) = found_by(second, Timings.resume(timings.path), tasks=(again,))
        assert found == Found(again, {UP: TWO, DOWN: EIGHT}, True)
        assert first.seen + second.seen == whole.seen
        assert incomplete([again], Timings.resume(timings.path)) == []


def test_todays_plans_stay_where_nothing_is_faster(timings: Timings) -> None:
    """The search starts from the rule, and does not find what an earlier one found."""

    def cost(plans: LayerPlans) -> float:
        return {(ONE, FOUR): 100.0, (TWO, EIGHT): 70.0}.get((plans[UP], plans[DOWN]), 120.0)

    today = {UP: TWO, DOWN: EIGHT}
    task = LayerTask(LAYER, TASK.candidates, today)
    assert found_by(Measured(cost), timings, tasks=(task,))[0].plans == today
    # What is told of a layer is the first time of today's plans, of the rule's and of the best.
    assert timings.of(Round(LAYER, 0), (TWO, EIGHT)) == 70.0
    slow = LayerTask(LAYER, TASK.candidates, {UP: TWO, DOWN: FOUR})
    assert found_by(Measured(cost), timings, tasks=(slow,))[0].plans == RULES


def test_without_time_todays_plans_stay(timings: Timings) -> None:
    task = LayerTask(LAYER, TASK.candidates, {UP: TWO, DOWN: EIGHT})
    assert found_by(Measured(alone), timings, 0, (task,)) == [Found(task, task.today, False)]


def test_a_product_of_two_layers_keeps_the_plan_of_the_first(timings: Timings) -> None:
    other = MatmulKey("gated", 4, 8192, 4096, 16)
    narrow = LAYER._replace(width=8192)
    second = LayerTask(narrow, {other: [ONE, TWO], DOWN: [FOUR, EIGHT]}, {other: ONE, DOWN: FOUR})

    def cost(plans: LayerPlans) -> float:
        return alone(plans) if UP in plans else {ONE: 9.0, TWO: 5.0}[plans[other]] + (plans[DOWN] == EIGHT)

    first, found = found_by(Measured(cost), timings, tasks=(TASK, second))
    assert first.plans[DOWN] == EIGHT
    assert found.plans == {other: TWO, DOWN: EIGHT}
    assert found.complete


def test_plans_that_break_the_device_end_the_run_and_are_not_tried_again(timings: Timings) -> None:
    def cost(plans: LayerPlans) -> float:
        if plans[DOWN] == EIGHT:
            raise RuntimeError("broke the device")
        return alone(plans)

    with pytest.raises(RuntimeError, match="broke the device"):
        found_by(Measured(cost), timings)
    resumed, measured = Timings.resume(timings.path), Measured(cost)
    assert resumed.of(Round(LAYER, 0), (TWO, EIGHT)) == float("inf")
    assert found_by(measured, resumed)[0].plans == {UP: TWO, DOWN: FOUR}
    assert all(plans[DOWN] != EIGHT for plans in measured.seen)


def test_times_are_measured_once(timings: Timings) -> None:
    measured = Measured(alone)
    times = LayerTimes(LAYER, timings, measured, lambda: False)
    assert [times(RULES), times(RULES), times(RULES, 1)] == [100.0, 100.0, 100.0]
    assert len(measured.seen) == 2
    with pytest.raises(OutOfTimeError):
        LayerTimes(LAYER, timings, measured, lambda: True)(RULES, 2)


def test_a_descent_starts_from_the_rules_and_from_what_is_settled(timings: Timings) -> None:
    task = LayerTask(LAYER, TASK.candidates, {UP: TWO, DOWN: TWO})
    times = LayerTimes(LAYER, timings, Measured(alone), lambda: False)
    descent = Descent(task, {UP: TWO}, times, lambda _key, _plan: True)
    assert descent.plans == {UP: TWO, DOWN: FOUR}
    assert descent.today == {UP: TWO, DOWN: TWO}
