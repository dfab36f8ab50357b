"""Derived facts of a plan."""

from typing import Any

import pytest

from tandem.engine_core.plan import ScheduledSequence, StepPlan


def row(length: int = 1, samples: bool = True, constrained: bool = False, start: int = 0) -> ScheduledSequence:
    return ScheduledSequence(1, 1, start, length, samples, constrained=constrained)


def plan(*rows: ScheduledSequence) -> StepPlan:
    return StepPlan.of(1, rows)


def test_row_ends_where_its_sample_goes() -> None:
    assert row(length=3, start=4).end == 7


@pytest.mark.parametrize(("lengths", "total"), [([], 0), ([1], 1), ([1, 1, 1], 3), ([1, 7, 20], 28)])
def test_total_tokens_sums_the_rows(lengths: list[int], total: int) -> None:
    assert plan(*[row(length) for length in lengths]).total_tokens == total


@pytest.mark.parametrize(
    ("rows", "needed"),
    [
        ((), False),
        ((row(),), False),
        ((row(constrained=True),), True),
        ((row(constrained=True, samples=False),), False),
        ((row(), row(constrained=True)), True),
        ((row(constrained=True, samples=False), row()), False),
    ],
)
def test_plan_needs_a_mask_where_a_constrained_row_samples(rows: tuple[ScheduledSequence, ...], needed: bool) -> None:
    assert plan(*rows).needs_mask is needed


def test_plans_are_immutable() -> None:
    frozen = plan(row())
    for thing, name in ((frozen, "step_id"), (frozen.rows[0], "length")):
        with pytest.raises(AttributeError):
            setattr(thing, name, 5)


@pytest.mark.parametrize(
    ("news", "plain"),
    [
        ({}, True),
        ({"tokens": b"\1\0\0\0"}, False),
        ({"new_pages": (3,)}, True),
        ({"constrained": True}, False),
    ],
)
def test_unconstrained_decode_has_no_tokens_and_no_constraint(news: dict[str, Any], plain: bool) -> None:
    assert plan(row(), ScheduledSequence(2, 2, 5, 1, True, **news)).is_unconstrained_decode is plain


def test_updated_rows_bring_tokens_or_pages() -> None:
    quiet, tokens, pages = (
        row(),
        ScheduledSequence(2, 2, 5, 1, True, tokens=b"\1\0\0\0"),
        ScheduledSequence(3, 3, 5, 1, True, new_pages=(3,)),
    )
    assert plan(quiet, tokens, pages).updated_rows == (tokens, pages)
