"""Times choose plans: measured once, kept in a file, and only a clear gain replaces what is used today."""

from itertools import chain, repeat
from pathlib import Path

import pytest

from benchmarks.tune.timings import AnyPlan, Choice, Key, Task, Timings, choose_best, measure, merged
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, GemvPlan, SplitKPlan, Tile, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import DecodeKey, MatmulKey, TileTable, W8A8GemmKey

KEY = DecodeKey(64, 16, 512)
TODAY, OTHER, BEST, LAST = (DecodePlan(Tile(positions, 4, 3), 1024) for positions in (16, 32, 64, 128))
TASK = Task(KEY, (TODAY, OTHER, BEST, LAST), TODAY)
TIMES = {TODAY: 10.0, OTHER: 9.0, BEST: 8.0, LAST: float("inf")}


class Clock:
    """Time that runs out after some questions."""

    def __init__(self, left: int) -> None:
        self.answers = chain(repeat(False, left), repeat(True))

    def __call__(self) -> bool:
        return next(self.answers)


def always(_key: Key, _plan: AnyPlan) -> bool:
    return True


def run(timings: Timings, left: int = 100, tasks: tuple[Task, ...] = (TASK,)) -> tuple[bool, list[DecodePlan]]:
    """Measure with made-up times; return whether all were, and which plans."""
    timed: list[DecodePlan] = []

    def time_plan(_key: DecodeKey, plan: DecodePlan) -> float:
        timed.append(plan)
        return TIMES[plan]

    return measure(tasks, time_plan, timings, always, Clock(left)), timed


def test_the_fastest_plan_is_chosen(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "t.jsonl")
    assert run(timings) == (True, [TODAY, OTHER, BEST, LAST])
    assert choose_best([TASK], timings) == [Choice(TASK, BEST, 8.0, 10.0, 10.0)]


def test_a_run_out_of_time_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.jsonl"
    assert run(Timings.resume(path), left=2) == (False, [TODAY, OTHER])
    resumed = Timings.resume(path)
    assert choose_best([TASK], resumed)[0].plan == OTHER
    assert run(resumed) == (True, [BEST, LAST])
    assert Timings.resume(path).found == resumed.found
    assert resumed.of(KEY, LAST) == float("inf")


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run(Timings(path))
    path.write_text(path.read_text()[:-20] + "\n[]\n{}\n")
    assert run(Timings.resume(path)) == (True, [LAST])


def test_a_gain_within_the_noise_changes_nothing(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "t.jsonl")
    for plan, us in ((TODAY, 10.0), (OTHER, 9.85), (BEST, 12.0)):
        timings.add(KEY, plan, us)
    assert choose_best([TASK], timings)[0].plan == TODAY
    timings.add(KEY, LAST, 9.79)
    assert choose_best([TASK], timings)[0].plan == LAST


def test_nothing_is_chosen_without_the_time_of_today(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "t.jsonl")
    timings.add(KEY, OTHER, 1.0)
    assert choose_best([TASK], timings) == []


def test_plans_that_were_not_compiled_wait_for_a_later_run(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "t.jsonl")
    compiled = {BEST}
    assert measure([TASK], lambda _, plan: TIMES[plan], timings, lambda _, plan: plan in compiled, Clock(9))
    assert {plan for _, plan in timings.found} == {repr(TODAY), repr(BEST)}


def test_a_table_gets_what_differs_from_the_rule_and_keeps_the_rest() -> None:
    product, one_row = MatmulKey("product", 16, 3072, 2048, 64), MatmulKey("product", 16, 3072, 2048, 1)
    of_bytes = W8A8GemmKey("int8", "output", 3072, 2048, 64)
    small, large = SplitKPlan(64, 128, 2), SplitKPlan(64, 64, 4)
    old = TileTable("NVIDIA Test", {one_row: GemvPlan(4, 1024), product: large}, {})
    plans: dict[Key, AnyPlan] = {product: None, KEY: BEST, of_bytes: W8A8GemmPlan(16, 64, 8, 4, 4)}
    rules: dict[Key, AnyPlan] = {product: small, KEY: TODAY, of_bytes: None}
    found = merged(old, "NVIDIA Test", plans, rules)
    assert dict(found.products) == {one_row: GemvPlan(4, 1024), product: None}
    assert dict(found.decode) == {KEY: BEST}
    assert dict(found.byte_products) == {of_bytes: W8A8GemmPlan(16, 64, 8, 4, 4)}
    assert dict(old.products)[product] == large
    back = merged(found, "NVIDIA Test", {product: small}, rules)
    assert dict(back.products) == {one_row: GemvPlan(4, 1024)}


def test_a_plan_of_today_that_cannot_run_is_replaced(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "t.jsonl")
    timings.add(KEY, TODAY, float("inf"))
    timings.add(KEY, OTHER, float("inf"))
    assert choose_best([TASK], timings) == []
    timings.add(KEY, LAST, 9.0)
    assert choose_best([TASK], timings)[0].plan == LAST


def test_a_plan_that_breaks_the_device_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"

    def time_plan(_key: DecodeKey, plan: DecodePlan) -> float:
        if plan == OTHER:
            raise RuntimeError("broke the device")
        return TIMES[plan]

    with pytest.raises(RuntimeError, match="broke the device"):
        measure([TASK], time_plan, Timings(path), always, Clock(100))
    resumed = Timings.resume(path)
    assert resumed.of(KEY, OTHER) == float("inf")
    assert measure([TASK], time_plan, resumed, always, Clock(100))
    assert choose_best([TASK], resumed)[0].plan == BEST
