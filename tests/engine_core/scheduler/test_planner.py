"""Steps with decode rows and prompts, planned by choosing among the prompts only and among all rows."""

import random
from typing import Any

import pytest

from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.scheduler.policy import MAX_STEPS_SKIPPED
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tests.fakes.constraint import FakeConstraint
from tests.support.scheduling import END, commit, new, sequence

TABLE = {(0, size): 1.0 + size for size in (1, 2, 4, 8, 16)} | {(size, 0): 1.0 + size / 8 for size in (1, 4, 16)}


def by_sequence(rows: tuple[ScheduledSequence, ...]) -> list[ScheduledSequence]:
    return sorted(rows, key=lambda row: row.seq_id)


def content(plan: StepPlan | None) -> dict[str, Any]:
    """Return what a plan holds, whatever the order of its rows."""
    assert plan is not None
    assert plan == StepPlan.of(plan.step_id, plan.rows, plan.admitted, plan.logprobs)
    return {
        "rows": by_sequence(plan.rows),
        "updated": by_sequence(plan.updated_rows),
        "admitted": sorted(plan.admitted, key=lambda seq: seq.seq_id),
        "flags": (plan.total_tokens, plan.needs_mask, plan.is_unconstrained_decode, plan.is_decode_only),
    }


@pytest.mark.parametrize("max_itl", [None, 9.0])
@pytest.mark.parametrize("chunk", [0, 4, 16])
@pytest.mark.parametrize("cache", [False, True])
def test_rows_in_steady_decode_need_no_choice(cache: bool, chunk: int, max_itl: float | None) -> None:
    chance = random.Random(chunk)
    scheduler = new(
        rows=8, pages=400, step=32, chunk=chunk, cache=cache, max_itl=max_itl, prompts=chance.choice((0, 2)),
        costs=StepCosts(TABLE, AttentionShare(0.001, 0.001)),
    )  # fmt: skip
    mixed = 0
    for step in range(1, 400):
        for number in range(3 * step, 3 * step + chance.choice((0, 0, 1, 2)) * (step < 150)):
            seq = sequence(number, chance.randint(1, 30), chance.randint(1, 9), first=chance.choice((10, 40)))
            seq.constraint = FakeConstraint(chance.choice(("stops 4", "parity"))) if chance.random() < 0.3 else None
            scheduler.add(seq)
        scheduler.admit_waiting()
        running, held = scheduler._running, scheduler._held.values()
        plan = scheduler.plan_step(step)
        assert (plan is None) == (scheduler.planner.plan_general(step, running, held) is None)
        if plan is None:
            if step > 150:
                break
            continue
        assert content(plan) == content(scheduler.planner.plan_general(step, running, held))
        kinds = [row.length > 1 for row in plan.rows]
        mixed += any(kinds) and not all(kinds)
        scheduler.on_launch(plan)
        commit(scheduler, plan, [END if chance.random() < 0.1 else 20 + 2 * (step % 9) for _ in plan.rows])
        assert scheduler.audit() == []
    assert mixed > 20, "steps of both kinds of rows"
    assert not scheduler.num_open


def test_overdue_prompts_are_planned_as_with_a_choice_among_all_rows() -> None:
    """Eight prompts of which the first takes most of a step: the others are overdue together, and ask for all of it."""
    scheduler = new(rows=32, pages=4000, step=64, chunk=24, cache=False)
    for number in range(1, 21):
        scheduler.add(sequence(number, 1, 400, first=number))
    overdue = 0
    for step in range(1, 80):
        if step == 3:
            for number in range(30, 38):
                scheduler.add(sequence(number, 900, 9, first=number))
        scheduler.admit_waiting()
        running, held = scheduler._running, scheduler._held.values()
        plan = scheduler.plan_step(step)
        assert plan is not None
        assert content(plan) == content(scheduler.planner.plan_general(step, running, held))
        overdue += any(seq.steps_skipped >= MAX_STEPS_SKIPPED - 1 for seq in scheduler.running.values())
        scheduler.on_launch(plan)
        commit(scheduler, plan, [20] * len(plan.rows))
    assert overdue
