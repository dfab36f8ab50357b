"""Expected durations of steps: the table, what context adds, and the correction by measured steps."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts, StepWork, max_qk_pairs, num_pairs

TABLE = {(1, 0): 1.0, (8, 0): 2.0, (0, 64): 4.0, (8, 64): 5.0, (0, 128): 6.0, (8, 128): 8.0, (0, 512): 20.0}
SHARE = AttentionShare(context=1e-3, pairs=1e-2)


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (1, 0, 1.0),
        (2, 0, 2.0),
        (8, 0, 2.0),
        (16, 0, 4.0),
        (0, 1, 4.0),
        (0, 65, 6.0),
        (0, 1024, 40.0),
        (1, 64, 5.0),
        (8, 65, 8.0),
        (8, 128, 8.0),
        (1, 129, 20.0),
        (9, 64, 6.0),
        (12, 1012, 40.0),
    ],
)
def test_a_step_takes_as_long_as_the_smallest_size_that_holds_it(rows: int, tokens: int, expected: float) -> None:
    assert StepCosts(TABLE, AttentionShare()).milliseconds(StepWork(rows, 10**6, tokens, 10**6)) == expected


def test_context_adds_its_share_of_the_weights() -> None:
    costs = StepCosts(TABLE, SHARE)
    assert costs.milliseconds(StepWork(1, 500)) == pytest.approx(1.0 + 500 * 1e-3 * 1.0)
    assert costs.milliseconds(StepWork(0, 0, 64, 700)) == pytest.approx(4.0 + 700 * 1e-2 * 20.0 / 512)


def test_context_counts_from_where_rows_were_timed() -> None:
    """Rows below that position take as long as the table says, and steps with prompts were timed without context."""
    costs = StepCosts(TABLE, SHARE, timed_context=100)
    assert costs.milliseconds(StepWork(2, 1000)) == pytest.approx(2.0 + 800 * 1e-3 * 1.0)
    assert costs.milliseconds(StepWork(2, 150)) == 2.0
    assert costs.milliseconds(StepWork(2, 150, 64)) == pytest.approx(5.0 + 150 * 1e-3 * 1.0)


def test_an_empty_table_expects_nothing() -> None:
    costs = StepCosts({}, SHARE)
    costs.correct(StepWork(1, 1), 5.0)
    assert costs.milliseconds(StepWork(1, 1, 1, 1)) == 0.0
    assert costs.token_sizes == ()


def test_the_work_of_a_plan_counts_every_pair_of_positions() -> None:
    rows = [ScheduledSequence(1, 1, 7), ScheduledSequence(2, 2, 0), ScheduledSequence(3, 3, 5, 3)]
    assert StepWork.of(rows) == StepWork(2, 7, 3, 6 + 7 + 8)


@given(st.integers(0, 50), st.integers(1, 50))
def test_pairs_are_counted_as_one_by_one(start: int, length: int) -> None:
    assert num_pairs(start, length) == sum(range(start + 1, start + length + 1))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6), st.data())
def test_no_division_of_a_step_among_prompts_has_more_pairs_than_bounded(
    prompts: list[tuple[int, int]], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, lacking)) for _, lacking in prompts]
    pairs = sum(num_pairs(start, length) for (start, _), length in zip(prompts, lengths, strict=True))
    assert pairs <= max_qk_pairs(prompts, sum(lengths))


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 60))
def test_the_bound_of_one_prompt_is_exact(start: int, lacking: int, tokens: int) -> None:
    assert max_qk_pairs([(start, lacking)], tokens) == num_pairs(start, min(lacking, tokens))


def test_the_bound_of_whole_prompts_of_one_length_is_exact() -> None:
    assert max_qk_pairs([(0, 256)] * 5, 512) == 2 * num_pairs(0, 256)


def test_sizes_with_decode_rows_are_those_in_the_table() -> None:
    assert StepCosts(TABLE, SHARE).mixed_token_sizes == (64, 128)
    assert StepCosts({(1, 0): 1.0, (0, 64): 4.0, (0, 128): 6.0}, SHARE).mixed_token_sizes == (64, 128)


def test_slow_steps_with_prompts_do_not_affect_steps_without() -> None:
    costs = StepCosts(TABLE, SHARE)
    for _ in range(50):
        costs.correct(StepWork(8, 0, 64), 7.5)
    assert costs.milliseconds(StepWork(8, 0, 64)) == pytest.approx(7.5, rel=0.1)
    assert costs.milliseconds(StepWork(8, 0)) == 2.0


@pytest.mark.parametrize(
    "truth", [(1, 1, 1, 1), (1.3, 1.1, 0.4, 3.0), (0.8, 1.2, 5.0, 0.2), (2.0, 2.0, 1.0, 1.0), (0.9, 1.5, 1.0, 1.0)]
)
def test_measured_steps_of_any_kind_correct_all_expectations(truth: tuple[float, float, float, float]) -> None:
    rng = random.Random(1)
    costs, exact = StepCosts(TABLE, SHARE), StepCosts(TABLE, SHARE)
    exact._factors[:] = truth

    def work() -> StepWork:
        tokens = rng.choice([0, 0, 64, 512])
        return StepWork(rng.randint(1, 8), rng.randint(0, 20_000), tokens, num_pairs(rng.randint(0, 2000), tokens))

    for _ in range(60):
        seen = work()
        costs.correct(seen, exact.milliseconds(seen) * rng.uniform(0.95, 1.05))
    for _ in range(200):
        unseen = work()
        assert costs.milliseconds(unseen) == pytest.approx(exact.milliseconds(unseen), rel=0.15)


def test_one_step_that_something_held_up_changes_little() -> None:
    costs = StepCosts(TABLE, SHARE)
    for _ in range(20):
        costs.correct(StepWork(8, 1000), 3.0)
    costs.correct(StepWork(8, 1000), 300.0)
    assert costs.milliseconds(StepWork(8, 1000)) < 2 * 3.0
    for _ in range(20):
        costs.correct(StepWork(8, 1000), 3.0)
    assert costs.milliseconds(StepWork(8, 1000)) == pytest.approx(3.0, rel=0.15)


def test_steps_without_context_never_make_its_factors_uncertain() -> None:
    costs = StepCosts(TABLE, SHARE)
    for _ in range(1000):
        costs.correct(StepWork(8, 0), 2.2)
    costs.correct(StepWork(8, 10), 2.6)
    assert costs.milliseconds(StepWork(8, 5_000)) == pytest.approx(2.2 + 5.0, rel=0.5)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**6), st.integers(0, 600), st.floats(0, 1e4))))
def test_expectations_stay_finite_and_are_never_negative(steps: list[tuple[int, int, int, float]]) -> None:
    costs = StepCosts(TABLE, SHARE)
    for rows, context, tokens, milliseconds in steps:
        work = StepWork(rows, context, tokens, num_pairs(context, tokens))
        if rows or tokens:
            costs.correct(work, milliseconds)
        assert 0.0 <= costs.milliseconds(work) < 1e12
