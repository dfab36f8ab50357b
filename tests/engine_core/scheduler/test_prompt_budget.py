"""Prompts beside streams, in simulated time: what a step may take, and who waits how long."""

from collections.abc import Mapping

import pytest

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.planner import IDLE_MS, IDLE_SLOWDOWN, LEAST_MS, SLOWDOWN
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts, StepWork, num_pairs
from tests.support.scheduling import new, sequence

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = (1, 4, 16, 64)
TABLE = (
    {(rows, 0): 1.0 + rows / 64 for rows in ROWS}
    | {(0, size): 0.8 + size / 256 for size in SIZES}
    | {(rows, size): 1.0 + (rows + size) / 256 for rows in ROWS for size in SIZES[:6]}
)
"""Milliseconds of steps of a device that computes 256 positions in one."""
SHARE = AttentionShare(context=1e-5, pairs=1e-5)
LONG = 16_384


class Simulation:
    """A scheduler with one step in flight, on a device that takes exactly as long as the table says."""

    def __init__(
        self, max_itl: float | None = None, table: Mapping[tuple[int, int], float] = TABLE, **settings: int
    ) -> None:
        self.costs = StepCosts(table, SHARE)
        self.scheduler: Scheduler = new(
            rows=64, pages=40_000, step=8192, chunk=8192, page_size=16, cache=False, max_itl=max_itl, costs=self.costs,
            **settings,
        )  # fmt: skip
        self.now = 0.0
        self.first: dict[int, float] = {}
        """Time of each sequence's first token."""
        self.steps: list[tuple[StepPlan, float]] = []
        """Each step with its milliseconds."""
        self._number = 0

    def add(self, prompt: int, max_tokens: int = 10_000) -> int:
        """Submit a prompt of its own; return its number."""
        self._number += 1
        self.scheduler.add(sequence(self._number, prompt, max_tokens, first=1000 + self._number))
        return self._number

    def step(self) -> StepPlan:
        """Run one step."""
        self.scheduler.admit_waiting()
        plan = self.scheduler.plan_step(len(self.steps) + 1)
        assert plan is not None
        milliseconds = self.costs.milliseconds(StepWork.of(plan.rows))
        self.now += milliseconds
        self.steps.append((plan, milliseconds))
        self.scheduler.on_launch(plan)
        sampled = [row for row in plan.rows if row.samples]
        for row in sampled:
            self.first.setdefault(row.seq_id, self.now)
        counts = [int(row.samples) for row in plan.rows]
        self.scheduler.commit(plan, StepResult(counts, [10] * len(sampled), milliseconds=milliseconds))
        return plan

    def run_until(self, *numbers: int) -> None:
        """Run until these sequences have their first tokens."""
        while not self.first.keys() >= set(numbers):
            self.step()

    def streams(self, count: int) -> None:
        """Bring sequences into decode, with their prompts computed."""
        self.run_until(*[self.add(64) for _ in range(count)])
        self.steps.clear()


@pytest.mark.parametrize("streams", [1, 4, 40])
@pytest.mark.parametrize("max_itl", [None, 2.0, 12.0, 60.0])
def test_no_step_takes_longer_than_streams_may_wait(streams: int, max_itl: float | None) -> None:
    run = Simulation(max_itl)
    run.streams(streams)
    run.run_until(*[run.add(LONG) for _ in range(3)])
    for plan, milliseconds in run.steps:
        decoding = [row for row in plan.rows if row.length == 1]
        alone = run.costs.milliseconds(StepWork.of(decoding))
        context = sum(row.start for row in decoding)
        smallest = run.costs.milliseconds(StepWork(len(decoding), context, SIZES[0], num_pairs(LONG, SIZES[0])))
        assert milliseconds <= max(max_itl or max(LEAST_MS, SLOWDOWN * alone), smallest) * 1.0001
        assert len(decoding) >= streams, "every stream is in every step"


def test_the_time_that_streams_give_is_used() -> None:
    run = Simulation(max_itl=20.0)
    run.streams(4)
    run.run_until(run.add(LONG))
    # Sizes are powers of two here, so a step may take less than half of what it is allowed.
    assert min(milliseconds for _, milliseconds in run.steps[:-1]) > 20.0 / 3


def test_steps_without_streams_take_at_most_a_tenth_of_a_second() -> None:
    run = Simulation()
    run.run_until(run.add(LONG), run.add(LONG))
    until_first = [milliseconds for plan, milliseconds in run.steps if all(row.length > 1 for row in plan.rows)]
    assert max(until_first) <= IDLE_MS
    assert run.steps[0][0].total_tokens == 8192


def test_a_device_that_needs_long_for_one_position_computes_several_in_a_step() -> None:
    slow = {(1, 0): 300.0} | {(0, size): 300.0 + 20 * (size - 1) for size in (1, 8, 32, 64, 512)}
    run = Simulation(table=slow)
    run.run_until(run.add(640))
    assert [plan.total_tokens for plan, _ in run.steps] == [32] * 20
    assert max(milliseconds for _, milliseconds in run.steps) <= IDLE_SLOWDOWN * 300


def test_long_prompts_finish_one_after_the_other() -> None:
    run = Simulation()
    run.streams(4)
    begun = run.now
    numbers = [run.add(LONG) for _ in range(8)]
    run.run_until(*numbers)
    waits = [run.first[number] - begun for number in numbers]
    assert waits[0] < 0.25 * waits[-1], "the first does not wait for the others"
    assert sorted(waits)[len(waits) // 2 - 1] < 0.7 * waits[-1], "half have begun long before the last"


def test_a_short_prompt_is_in_the_next_step_behind_any_number_of_long_ones() -> None:
    run = Simulation()
    run.streams(4)
    for _ in range(8):
        run.add(LONG)
    for _ in range(5):
        run.step()
    short = run.add(100)
    plan = run.step()
    assert next(row.length for row in plan.rows if row.seq_id == short) == 100


def test_a_step_slower_than_expected_makes_the_next_ones_smaller() -> None:
    run = Simulation()
    run.streams(4)
    run.add(4 * LONG)
    before = run.step().total_tokens
    for _ in range(60):
        work = StepWork(4, 300, before, before**2)
        run.costs.correct(work, 3.0 * (1.0 + before / 256))
    assert run.step().total_tokens < 0.6 * before


def test_chunks_and_their_number_remain_limits() -> None:
    run = Simulation(prompts=1)
    run.streams(4)
    for _ in range(2):
        run.add(LONG)
    assert sum(row.length > 1 for row in run.step().rows) == 1
