"""Prompts and streams in simulated time: durations of steps, and waiting times."""

from collections.abc import Mapping

import pytest

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts, StepWork, num_pairs
from tandem.engine_core.scheduler.time_budget import (
    DECODE_STEP_RATIO,
    EFFICIENT_MS,
    IDLE_MS,
    IDLE_STEP_RATIO,
    MAX_POSITION_COST,
    MAX_STRETCH,
    MIN_STEP_MS,
    allowed_milliseconds,
    fitting_tokens,
)
from tests.fakes.constraint import FakeConstraint
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
    """A scheduler with one step in flight, on a device with the durations of the table. slowdown: factor of the real
    durations; grammar: of all sequences, if any.
    """

    def __init__(
        self,
        max_itl: float | None = None,
        table: Mapping[tuple[int, int], float] = TABLE,
        slowdown: float = 1.0,
        grammar: str | None = None,
        **settings: int,
    ) -> None:
        self.costs = StepCosts(table, SHARE)
        self.device = self.costs
        if slowdown != 1.0:
            self.device = StepCosts({size: slowdown * time for size, time in table.items()}, SHARE)
        self.grammar = grammar
        self.scheduler: Scheduler = new(
            rows=64, pages=40_000, step=8192, chunk=8192, page_size=16, cache=False, max_itl=max_itl, costs=self.costs,
            **settings,
        )  # fmt: skip
        self.now = 0.0
        self.first: dict[int, float] = {}
        """Time of each sequence's first token."""
        self.steps: list[tuple[StepPlan, float]] = []
        """Each step with its milliseconds."""
        self.ended = 0
        self.present: list[int] = []
        """Running sequences of each step."""
        self._number = 0

    def add(self, prompt: int, max_tokens: int = 10_000) -> int:
        """Submit a prompt of its own; return its number."""
        self._number += 1
        seq = sequence(self._number, prompt, max_tokens, first=1000 + self._number)
        seq.constraint = FakeConstraint(self.grammar) if self.grammar else None
        self.scheduler.add(seq)
        return self._number

    def step(self) -> StepPlan:
        """Run one step."""
        self.scheduler.admit_waiting()
        plan = self.scheduler.plan_step(len(self.steps) + 1)
        assert plan is not None
        self.present.append(len(self.scheduler.running))
        milliseconds = self.device.milliseconds(StepWork.of(plan.rows))
        self.now += milliseconds
        self.steps.append((plan, milliseconds))
        self.scheduler.on_launch(plan)
        sampled = [row for row in plan.rows if row.samples]
        for row in sampled:
            self.first.setdefault(row.seq_id, self.now)
        counts = [int(row.samples) for row in plan.rows]
        updates = self.scheduler.commit(plan, StepResult(counts, [10] * len(sampled), milliseconds=milliseconds))
        self.ended += len(updates.ended)
        return plan

    def run_until(self, *numbers: int) -> None:
        """Run until these sequences have their first tokens."""
        while not self.first.keys() >= set(numbers):
            self.step()

    def streams(self, count: int) -> None:
        """Bring sequences into decode, with their prompts computed."""
        self.run_until(*[self.add(64) for _ in range(count)])
        self.steps.clear()
        self.present.clear()

    def serve(self, streams: int, prompt: int, output: int, requests: int) -> list[int]:
        """Answer requests of streams that send the next one when the last ended; return the decoding rows of steps."""
        for _ in range(streams):
            self.add(prompt, output)
        decoding, answered = [], 0
        while answered < requests:
            plan = self.step()
            decoding.append(sum(row.length == 1 for row in plan.rows))
            for _ in range(answered, self.ended):
                self.add(prompt, output)
            answered = self.ended
        return decoding


@pytest.mark.parametrize("streams", [1, 4, 40])
@pytest.mark.parametrize("max_itl", [None, 2.0, 12.0, 60.0])
def test_no_step_takes_longer_than_streams_may_wait(streams: int, max_itl: float | None) -> None:
    run = Simulation(max_itl)
    run.streams(streams)
    run.run_until(*[run.add(LONG) for _ in range(3)])
    for (plan, milliseconds), present in zip(run.steps, run.present, strict=True):
        decoding = [row for row in plan.rows if row.length == 1]
        context = sum(row.start for row in decoding)
        smallest = run.costs.milliseconds(StepWork(len(decoding), context, SIZES[0], num_pairs(LONG, SIZES[0])))
        alone = run.costs.milliseconds(StepWork(present, context))
        stretch = min(MAX_STRETCH, present / len(decoding))
        limit = max_itl or max(EFFICIENT_MS, stretch * max(MIN_STEP_MS, DECODE_STEP_RATIO * alone))
        assert milliseconds <= max(limit, smallest) * 1.0001
        assert len(decoding) >= streams, "every stream is in every step"


@pytest.mark.parametrize("grammar", [None, "stops 20000"])
def test_steps_correct_the_table_with_and_without_masks(grammar: str | None) -> None:
    """A load of constrained rows alone learns what its steps take, and keeps to the limit."""
    limit = 24.0
    run = Simulation(limit, slowdown=2.5, grammar=grammar)
    run.streams(16)
    run.run_until(run.add(LONG))
    learnt = len(run.steps)
    run.run_until(*[run.add(LONG) for _ in range(2)])
    assert all(plan.needs_mask == bool(grammar) for plan, _ in run.steps)
    assert max(milliseconds for _, milliseconds in run.steps[learnt:]) <= 1.15 * limit
    run.run_until(run.add(64))
    with_prompts = StepWork.of(run.steps[-1][0].rows)
    for _ in range(20):
        decoding = StepWork.of(run.step().rows)
    for work in (with_prompts, decoding):
        assert run.costs.milliseconds(work) == pytest.approx(run.device.milliseconds(work), rel=0.1)


@pytest.mark.parametrize(
    ("rows", "prompts", "expected"),
    [
        (0, 3, IDLE_MS),
        (4, 0, MIN_STEP_MS),
        (64, 0, DECODE_STEP_RATIO * 4.0),
        (64, 8, DECODE_STEP_RATIO * 5.0 * 72 / 64),
        (64, 16, DECODE_STEP_RATIO * 5.0 * 1.25),
        (1, 1000, DECODE_STEP_RATIO * 5.0 * 1001 / 128 * 1.25),
        (4, 1, MIN_STEP_MS * 1.25),
        (4, 4, MIN_STEP_MS * 1.25),
    ],
)
def test_rows_that_wait_for_prompts_count_toward_the_limit(rows: int, prompts: int, expected: float) -> None:
    table = {(1, 0): 1.0, (8, 0): 1.5, (64, 0): 4.0, (128, 0): 5.0, (0, 64): 2.0}
    costs = StepCosts(table, AttentionShare())
    assert allowed_milliseconds(costs, rows, 0, prompts, None) == pytest.approx(expected)


def costs_of(fixed: float, position: float, decode: float = 1.0) -> StepCosts:
    """Return the costs of steps that take `fixed` milliseconds, and `position` more for each prompt position."""
    mixed = {(rows, size): fixed + position * size for rows in (0, 4) for size in SIZES}
    return StepCosts({(4, 0): decode} | mixed, AttentionShare())


@pytest.mark.parametrize(
    ("costs", "max_itl", "expected"),
    [
        # Cheapest position at 40 ms: (2 + 0.01 * 2048) / 2048 = 0.0110; within 1.3 of it: 0.0139 at 512, not 0.0178.
        (costs_of(2.0, 0.01), None, 512),
        (costs_of(2.0, 0.01), 5.0, 256),
        (costs_of(2.0, 0.01), 100.0, 8192),
        # The limit of 6.25 ms already admits a size within 1.3 of the cheapest: 1024 at 0.0045, against 0.0034.
        (costs_of(0.5, 0.003), None, 1024),
        # 1024 positions would take 40.7 ms and are not compared: 512 is the best, and 256 costs 1.4 times as much.
        (costs_of(10.0, 0.03), None, 512),
        # Decode steps of 20 ms allow 50 ms and more already.
        (costs_of(10.0, 0.01, decode=20.0), None, 4096),
        # Even the smallest size takes more than 40 ms.
        (costs_of(100.0, 0.01), None, 64),
    ],
)
def test_a_larger_size_is_taken_where_its_positions_are_much_cheaper(
    costs: StepCosts, max_itl: float | None, expected: int
) -> None:
    found = fitting_tokens(costs, 4, 0, [(0, LONG)], max_itl)
    assert found == expected
    limit = allowed_milliseconds(costs, 4, 0, 1, max_itl)
    if SIZES[0] < found and costs.milliseconds(StepWork(4, 0, found)) > limit:
        cost = {size: costs.milliseconds(StepWork(4, 0, size)) / size for size in SIZES}
        best = min(cost[size] for size in SIZES if cost[size] * size <= EFFICIENT_MS)
        assert cost[found] <= MAX_POSITION_COST * best < cost[SIZES[SIZES.index(found) - 1]]


@pytest.mark.parametrize(
    ("copies", "max_itl", "expected"),
    [
        (0, 10.0, 512),  # 2 + 0.01 * 512 = 7.1 ms
        (3, 10.0, 512),
        (10, 10.0, 256),  # 4.6 ms, and 5 ms of copies
        (100, 10.0, 64),
        (0, None, 512),
        (10, None, 512),  # 512 positions are worth 12.1 ms
        (60, None, 256),  # beside copies of 30 ms, 512 are not compared up to 40 ms any more than 1024
        (1000, None, 64),
    ],
)
def test_copies_of_states_take_from_the_time_of_prompts(copies: int, max_itl: float | None, expected: int) -> None:
    table = {(rows, size): 2.0 + 0.01 * size for rows in (0, 4) for size in SIZES} | {(4, 0): 1.0}
    costs = StepCosts(table, AttentionShare(), state_copy_ms=0.5)
    assert fitting_tokens(costs, 4, 0, [(0, LONG)], max_itl, copies) == expected


@pytest.mark.parametrize(("rows", "prompts"), [(1, 0), (1, 60), (60, 1)])
def test_max_itl_is_never_stretched(rows: int, prompts: int) -> None:
    costs = StepCosts({(1, 0): 1.0, (0, 64): 2.0}, AttentionShare())
    assert allowed_milliseconds(costs, rows, 10_000, prompts, 7.0) == 7.0


def test_steps_with_streams_have_captured_sizes() -> None:
    run = Simulation(max_itl=1000.0)
    run.streams(4)
    run.run_until(*[run.add(LONG) for _ in range(3)])
    tokens = [sum(row.length for row in plan.rows if row.length > 1) for plan, _ in run.steps]
    assert max(tokens) == 2048, "the largest size that the table combines with rows"


def test_an_engine_under_full_load_fills_up() -> None:
    # Every decoding row needs 2 positions of prompts a step. With 64 rows a step may hold 128; were it limited by what
    # the decoding rows alone take, 32 rows could not have 64, and half of the streams would always wait.
    rows, sizes = (1, *range(8, 65, 8)), (16, 32, 48, 64, 96, 128, 192, 256)
    decode = {(count, 0): 4.0 + count / 8 for count in rows}
    run = Simulation(
        table=decode | {(count, size): 10.5 + (count + size) / 10 for count in (0, *rows) for size in sizes}
    )
    decoding = run.serve(64, 256, 128, requests=320)
    late = decoding[len(decoding) // 2 :]
    assert sum(late) / len(late) > 0.9 * 64


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
    assert max(milliseconds for _, milliseconds in run.steps) <= IDLE_STEP_RATIO * 300


def test_long_prompts_finish_one_after_the_other() -> None:
    run = Simulation()
    run.streams(4)
    begun = run.now
    numbers = [run.add(LONG) for _ in range(8)]
    run.run_until(*numbers)
    waits = [run.first[number] - begun for number in numbers]
    assert waits[0] < 0.25 * waits[-1], "the first does not wait for the others"
    assert sorted(waits)[len(waits) // 2 - 1] < 0.7 * waits[-1], "half have begun long before the last"


def test_a_prompt_of_128k_leaves_streams_their_steps_and_others_their_turn() -> None:
    run = Simulation(12.0)
    run.streams(4)
    long, short = run.add(131_072 - 200), run.add(2_000)
    run.run_until(long)
    assert run.first[short] < 0.1 * run.first[long]
    # Prompts always get the smallest size, however much the last positions of the long one attend to.
    context = 4 * 400 + 2_200
    smallest = run.costs.milliseconds(StepWork(5, context, SIZES[0], num_pairs(131_072, SIZES[0])))
    assert max(milliseconds for _, milliseconds in run.steps) <= max(12.0, smallest) * 1.0001
    assert all(sum(row.length == 1 for row in plan.rows) >= 4 for plan, _ in run.steps)


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
    run = Simulation(max_itl=6.0)
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


def test_limits_match_the_documented_ones() -> None:
    """The help of `--max-itl` and engine_core/MEMORY.md."""
    assert (MIN_STEP_MS, DECODE_STEP_RATIO, EFFICIENT_MS, IDLE_MS) == (5.0, 2.5, 40.0, 100.0)
