"""The memory that large bodies and answers may take, and the share of one API key."""

import pytest

from tandem.frontend.api.byte_budget import MAX_INLINE_BODY, ByteBudget
from tandem.frontend.errors import ApiError
from tests.support.refusals import numbers_in

SIZE = 100_000


def refused(budget: ByteBudget, owner: str, size: int = SIZE) -> str:
    with budget.reservation(owner) as reservation, pytest.raises(ApiError) as caught:
        reservation.grow(size)
    assert (caught.value.status, caught.value.code, caught.value.refusal) == (429, "overloaded", "bodies")
    return caught.value.message


def test_one_key_takes_at_most_half() -> None:
    budget = ByteBudget(4 * SIZE, "large bodies")
    held = [budget.reservation(owner) for owner in ("a", "a", "b")]
    for reservation in held:
        reservation.grow(SIZE)
    assert numbers_in(refused(budget, "a")) == [2 * SIZE, 2 * SIZE]
    with budget.reservation("b") as another:
        another.grow(MAX_INLINE_BODY)
        assert budget.used == 3 * SIZE, "what is small is not counted"
        another.grow(SIZE)
        assert numbers_in(refused(budget, "c")) == [4 * SIZE, 4 * SIZE]
    for reservation in held:
        reservation.release()
        reservation.release()
    assert (budget.used, budget.used_by) == (0, {})


def test_a_server_without_keys_has_one_owner_who_may_take_all() -> None:
    budget = ByteBudget(4 * SIZE, "large bodies")
    held = [budget.reservation() for _ in range(4)]
    for reservation in held:
        reservation.grow(SIZE)
    assert "at most 400000" in refused(budget, "")


def test_what_is_larger_than_the_budget_is_let_in_alone() -> None:
    budget = ByteBudget(4 * SIZE, "large bodies")
    with budget.reservation("a") as reservation:
        reservation.grow(3 * SIZE)
        reservation.grow(5 * SIZE)
        refused(budget, "a")
        refused(budget, "b")
    with budget.reservation("b") as reservation:
        reservation.grow(SIZE)
        refused(budget, "a", 5 * SIZE)
        with budget.reservation("a") as other:
            other.grow(3 * SIZE)
    assert budget.used == 0
