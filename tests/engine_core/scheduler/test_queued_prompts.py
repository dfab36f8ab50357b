"""Count of prompt tokens without output, against the scheduler's own sequences."""

import pytest

from tandem.engine_core.scheduler.queue import QueuedPrompts
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.support.scheduling import added, commit, launched, new, sequence, submitted


def test_prompt_counts_until_the_step_of_its_first_token_is_committed() -> None:
    scheduler = new(step=4, chunk=4)
    added(scheduler, sequence(1, prompt=6))
    assert scheduler.queued.num_tokens == 6
    commit(scheduler, launched(scheduler, 1), [0])
    assert scheduler.queued.num_tokens == 6, "a part of the prompt has no output"
    plan = launched(scheduler, 2)
    assert scheduler.queued.num_tokens == 6
    commit(scheduler, plan, [20])
    assert scheduler.queued.num_tokens == 0


def test_later_steps_of_a_pipeline_do_not_end_the_wait_of_a_prompt() -> None:
    scheduler = new()
    added(scheduler, sequence(1, prompt=6))
    first = launched(scheduler, 1)
    added(scheduler, sequence(2, prompt=3, first=50))
    second = launched(scheduler, 2)
    commit(scheduler, first, [20])
    assert scheduler.queued.num_tokens == 3
    commit(scheduler, second, [20] * len(second.rows))
    assert scheduler.queued.num_tokens == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_aborted_prompt_leaves_once(steps: int) -> None:
    scheduler = new()
    added(scheduler, seq := sequence(1, prompt=6), sequence(2, prompt=3, first=50))
    plans = [launched(scheduler, 1)] * steps
    scheduler.abort(seq.client, seq.request_id)
    assert scheduler.queued.num_tokens == 3
    for plan in plans:
        commit(scheduler, plan, [20] * len(plan.rows))
        assert scheduler.queued.num_tokens == 0


def test_prompt_preempted_before_its_first_token_still_counts() -> None:
    scheduler = new(step=4, chunk=4)
    added(scheduler, seq := sequence(1, prompt=6))
    commit(scheduler, launched(scheduler, 1), [0])
    scheduler.preempt(seq)
    assert scheduler.queued.num_tokens == 6
    scheduler.admit_waiting()
    commit(scheduler, launched(scheduler, 2), [0])
    commit(scheduler, launched(scheduler, 3), [20])
    assert scheduler.queued.num_tokens == 0


def test_tokens_that_a_grammar_forces_are_output() -> None:
    scheduler = new()
    seq = submitted(1, [10, 11, 12], SamplingParams(9))
    seq.constraint = FakeConstraint("runs 2")
    scheduler.add(seq)
    assert scheduler.queued.num_tokens == 3
    scheduler.admit_waiting()
    assert seq.generated > 0
    assert scheduler.queued.num_tokens == 0


def test_removal_is_idempotent() -> None:
    queued = QueuedPrompts()
    queued.add(sequence(1, prompt=6))
    for _ in range(2):
        queued.remove(1)
    assert queued.num_tokens == 0


def test_choices_count_once_and_each_reports_its_first_token() -> None:
    scheduler = new()
    params = [SamplingParams(3, ignore_eos=True, choice=choice) for choice in range(3)]
    added(scheduler, *[submitted(number, range(10, 16), one) for number, one in enumerate(params, 1)])
    assert scheduler.queued.num_tokens == 6
    first: list[int] = []
    for step in range(1, 20):
        scheduler.admit_waiting()
        plan = launched(scheduler, step)
        first += [seq.id for seq in commit(scheduler, plan, [20] * len(plan.rows)).first_tokens]
        if not scheduler.num_open:
            break
    assert (scheduler.queued.num_tokens, sorted(first)) == (0, [1, 2, 3])
