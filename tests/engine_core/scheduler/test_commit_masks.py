"""Masks of consecutive steps, which are one object as long as they are equal."""

import gc
import weakref
from itertools import pairwise
from random import Random

from tandem.engine_core.contracts import InternedList, MaskedRows
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.support.scheduling import added, commit, new, submitted

FREE, RUN = 20, 3
"""Under "runs", tokens after which nothing is forced, and after which 5 8 11 14 are."""


def constrained(number: int, prompt: int = 3, max_tokens: int = 30) -> Sequence:
    seq = submitted(number, range(10, 10 + prompt), SamplingParams(max_tokens), frozenset(), constraint="runs")
    seq.constraint, seq.compiling = FakeConstraint("runs"), False
    return seq


def step(scheduler: Scheduler, step_id: int, token: int = FREE) -> MaskedRows:
    """Plan, launch and commit a step; return its masks."""
    plan = scheduler.plan_step(step_id)
    assert plan is not None
    scheduler.on_launch(plan)
    masks = scheduler.masks(plan)
    commit(scheduler, plan, [token] * len(masks))
    return masks


def test_masks_are_the_same_while_the_rows_are_whatever_pages_they_need() -> None:
    scheduler = new()
    added(scheduler, constrained(1, prompt=3), constrained(2, prompt=5), constrained(3, prompt=6))
    first = step(scheduler, 1)
    assert isinstance(first, InternedList) and [row for row, _ in first] == [
        seq.row for seq in scheduler.running.values()
    ]
    assert {id(step(scheduler, step_id)) for step_id in range(2, 14)} == {id(first)}, "pages have four tokens"


def count_paged_behind(random: Random) -> int:
    """Run random sequences with two steps in flight; check the order of rows.

    Return the steps in which a row needs a page behind a sequence whose last position is in flight.
    """
    scheduler = new(rows=8, pages=80, step=64, chunk=64)
    sizes = [(random.randint(1, 9), random.randint(2, 9)) for _ in range(7)]
    added(scheduler, *[constrained(number, *size) for number, size in enumerate(sizes)])
    flights: list[StepPlan] = []
    num_behind = 0
    for step_id in range(1, 14):
        plan = scheduler.plan_step(step_id)
        if plan is not None:
            scheduler.on_launch(plan)
            flights.append(plan)
            planned = [row.seq_id for row in plan.rows]
            assert planned == sorted(planned)
            complete = scheduler.running.keys() - set(planned)
            num_behind += bool(complete) and any(row.new_pages and row.seq_id > min(complete) for row in plan.rows)
        if len(flights) == 2 or (plan is None and flights):
            oldest = flights.pop(0)
            commit(scheduler, oldest, [FREE] * len(oldest.sampled_rows))
    return num_behind


def test_rows_keep_their_order_behind_one_that_is_complete() -> None:
    assert sum(count_paged_behind(Random(seed)) for seed in range(40)) > 4


def test_masks_are_others_once_a_row_has_come_jumped_or_ended() -> None:
    scheduler, seen = new(), list[MaskedRows]()
    added(scheduler, constrained(1, max_tokens=20), constrained(2))
    seen += [step(scheduler, 1), step(scheduler, 2)]
    added(scheduler, constrained(3))
    seen += [step(scheduler, 3), step(scheduler, 4)]
    step(scheduler, 5, RUN)
    seen += [step(scheduler, 6), step(scheduler, 7)]
    scheduler.abort(b"c", 2)
    seen += [step(scheduler, 8), step(scheduler, 9)]
    assert [len(masks) for masks in seen] == [2, 2, 3, 3, 3, 3, 2, 2]
    assert [later is masks for masks, later in pairwise(seen)] == [True, False] * 3 + [True]


def test_what_was_kept_for_a_sequence_that_has_ended_is_gone() -> None:
    scheduler = new()
    added(scheduler, seq := constrained(1, max_tokens=6))
    kept = weakref.ref(seq.constraint)  # type: ignore[arg-type]
    step_id = 0
    while scheduler.running:
        step_id += 1
        step(scheduler, step_id)
    assert step_id == 6 and kept() is not None
    del seq
    gc.collect()
    assert kept() is None
