"""What the masks of a request and of a key may take."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.constraints.mask_budget import (
    CLEAR_SECONDS,
    FREE_SECONDS,
    KEY_RATE,
    KEY_SECONDS,
    REQUEST_SECONDS,
    MaskBudget,
    MaskCost,
)
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in


def spent(budget: MaskBudget, key: str) -> None:
    """Spend what a key's requests may take together."""
    for _ in range(2):
        budget.charge(MaskCost(key), FREE_SECONDS + CLEAR_SECONDS + KEY_SECONDS * 0.6)


def test_masks_at_the_free_cost_never_end_a_request() -> None:
    budget, cost = MaskBudget(FakeClock()), MaskCost()
    assert not any(budget.charge(cost, FREE_SECONDS) for _ in range(100_000))
    assert cost.debt == 0


def test_request_ends_when_its_masks_have_taken_its_seconds_beyond_the_free_cost() -> None:
    budget, cost, over = MaskBudget(FakeClock()), MaskCost(), REQUEST_SECONDS / 8.01
    problems = [budget.charge(cost, FREE_SECONDS + over) for _ in range(9)]
    assert problems[:8] == [""] * 8
    assert numbers_in(problems[8]) == [round(over * 9, 2), FREE_SECONDS * 1e3, REQUEST_SECONDS]
    assert budget.problem(cost) == problems[8]


def test_cheap_masks_pay_off_what_costly_ones_took_but_save_nothing_up() -> None:
    budget, cost = MaskBudget(FakeClock()), MaskCost()
    for _ in range(1000):
        budget.charge(cost, 0.0)
    budget.charge(cost, FREE_SECONDS * 3)
    assert cost.debt == pytest.approx(FREE_SECONDS * 2)
    budget.charge(cost, 0.0)
    assert cost.debt == pytest.approx(FREE_SECONDS)


def test_key_that_has_spent_its_budget_ends_its_costly_requests_only() -> None:
    budget, cheap, costly = MaskBudget(FakeClock()), MaskCost("a"), MaskCost("a")
    spent(budget, "a")
    assert not budget.charge(cheap, FREE_SECONDS + CLEAR_SECONDS * 0.9)
    problem = budget.charge(costly, FREE_SECONDS + CLEAR_SECONDS * 1.1)
    assert re.search(rf"\bAPI key\b.* {KEY_SECONDS:g} s\b", problem)
    assert not budget.charge(MaskCost("b"), FREE_SECONDS + CLEAR_SECONDS * 1.1), "another key"


def test_cold_masks_of_many_requests_take_nothing_from_their_key() -> None:
    budget, costly = MaskBudget(FakeClock()), MaskCost("a")
    assert not any(budget.charge(MaskCost("a"), FREE_SECONDS + CLEAR_SECONDS * 0.9) for _ in range(1000))
    assert not budget.charge(costly, FREE_SECONDS + CLEAR_SECONDS + KEY_SECONDS * 0.9)


def test_requests_without_a_key_share_a_budget_and_read_so() -> None:
    budget = MaskBudget(FakeClock())
    spent(budget, "")
    assert "without an API key" in budget.charge(MaskCost(), FREE_SECONDS + CLEAR_SECONDS * 1.1)


def test_key_gets_back_what_it_spent_with_time() -> None:
    clock = FakeClock()
    budget, costly = MaskBudget(clock), MaskCost("a")
    spent(budget, "a")
    costly.debt = CLEAR_SECONDS * 2
    assert budget.problem(costly)
    clock.advance(2 * KEY_SECONDS / KEY_RATE)
    assert not budget.problem(costly)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(FREE_SECONDS, 0.1), st.floats(0, 5)), max_size=60))
def test_key_never_takes_more_than_its_budget_and_a_last_mask_of_each_request(
    masks: list[tuple[str, float, float]],
) -> None:
    """A key has one request at a time, and sends the next when it has ended."""
    clock = FakeClock()
    budget, began = MaskBudget(clock), clock.now
    rows, ended, taken = {key: MaskCost(key) for key in "ab"}, dict.fromkeys("ab", 0), dict.fromkeys("ab", 0.0)
    for key, seconds, pause in masks:
        clock.advance(pause)
        taken[key] += seconds - FREE_SECONDS
        if budget.charge(rows[key], seconds):
            rows[key], ended[key] = MaskCost(key), ended[key] + 1
        allowed = KEY_SECONDS + KEY_RATE * (clock.now - began) + (ended[key] + 1) * (CLEAR_SECONDS + 0.1)
        assert taken[key] <= allowed + 1e-6
