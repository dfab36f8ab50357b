"""Derived facts of a plan."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


KINDS = (
    row(),
    row(constrained=True),
    ScheduledSequence(2, 2, 5, new_pages=(3,)),
    row(samples=False),
    row(length=3),
    ScheduledSequence(2, 2, 5, tokens=b"\1\0\0\0"),
    ScheduledSequence(2, 2, 5, prompt_logprob_ids=b"\1\0\0\0"),
)
"""Rows of every kind, the steady ones first."""
NUM_STEADY_KINDS = 3
KINDS_OF_ROWS = st.lists(st.integers(0, len(KINDS) - 1), max_size=6)


@given(KINDS_OF_ROWS)
def test_steady_rows_end_before_the_first_row_of_another_kind(kinds: list[int]) -> None:
    found = plan(*[KINDS[kind] for kind in kinds])
    others = [index for index, kind in enumerate(kinds) if kind >= NUM_STEADY_KINDS]
    assert found.num_steady == (others[0] if others else len(kinds))
    assert (*found.steady_rows, *found.other_rows) == found.rows
    assert found.is_decode_only is (not others)
    assert found.sampled_rows == tuple(row for row in found.rows if row.samples)
    assert found.chunk_rows == tuple(row for row in found.rows if not row.samples)
    assert found.is_unconstrained is not any(row.constrained for row in found.rows)


@given(KINDS_OF_ROWS, KINDS_OF_ROWS)
def test_plan_followed_by_another_equals_the_plan_of_all_rows(first: list[int], second: list[int]) -> None:
    plans = [plan(*[KINDS[kind] for kind in kinds]) for kinds in (first, second)]
    assert plans[0].followed_by(plans[1]) == plan(*plans[0].rows, *plans[1].rows)


@given(st.lists(st.integers(0, NUM_STEADY_KINDS - 1), max_size=6))
def test_plan_of_decoding_rows_equals_that_of_any_rows(kinds: list[int]) -> None:
    expected = plan(*[KINDS[kind] for kind in kinds])
    found = StepPlan.decode_only(
        1, expected.rows, needs_mask=expected.needs_mask, logprobs=-1, updated_rows=expected.updated_rows
    )
    assert found == expected
