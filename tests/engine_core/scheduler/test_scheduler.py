"""The scheduler alone: rows of a sequence, rejected requests, masks and commits."""

from array import array

import pytest

from tandem.engine_core.errors import RequestError
from tandem.engine_core.scheduler.policy import MAX_STEPS_SKIPPED
from tandem.protocol.engine_options import POLICIES, Policy
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Finished
from tests.fakes.constraint import FakeConstraint
from tests.support.scheduling import END, added, commit, launched, new, sequence


def test_rows_of_a_sequence_from_prompt_to_last_token() -> None:
    scheduler, seq = new(rows=3, step=3), sequence(7, min_tokens=2)
    added(scheduler, seq)
    first, second = launched(scheduler, 1), launched(scheduler, 2)
    assert [(row.start, row.length, row.samples) for row in (*first.rows, *second.rows)] == [
        (0, 3, False),
        (3, 2, True),
    ]
    assert array("i", first.rows[0].tokens).tolist() == [10, 11, 12]
    assert array("i", second.rows[0].tokens).tolist() == [13, 14]
    assert (first.rows[0].new_pages, first.rows[0].first_page) == (tuple(seq.pages[0][:1]), 0)
    assert (second.rows[0].new_pages, second.rows[0].first_page) == (tuple(seq.pages[0][1:]), 1)
    (admission,) = first.admitted
    assert (admission.seq_id, admission.row, admission.prompt_len, admission.end_ids) == (7, seq.row, 5, (END,))
    assert second.admitted == ()
    commit(scheduler, first, [-1])
    third = launched(scheduler, 3)
    assert [(row.start, row.length, row.samples, row.tokens) for row in third.rows] == [(5, 1, True, b"")]
    assert third.is_unconstrained_decode, "the device knows which tokens may be ends"
    commit(scheduler, second, [END])
    fourth = launched(scheduler, 4)
    assert fourth.is_unconstrained_decode
    assert scheduler.plan_step(5) is None, "the length is foreseen"
    commit(scheduler, third, [20])
    updates = commit(scheduler, fourth, [21])
    assert updates.num_tokens == 1
    (ended,) = updates.ended
    assert list(ended.tokens[5:]) == [END, 20, 21]
    assert ended.outcome == Finished(7, FinishReason.LENGTH)


def test_zombie_keeps_its_pages_until_its_last_step() -> None:
    scheduler, seq = new(), sequence(1, max_tokens=9)
    added(scheduler, seq)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    assert commit(scheduler, plans[0], [END]).num_zombies == 0
    assert seq.outcome == Finished(1, FinishReason.STOP, END)
    assert scheduler.memory.usage.in_use == 2
    assert scheduler.num_open == 0
    updates = commit(scheduler, plans[1], [33])
    assert (updates.num_zombies, updates.num_tokens, updates.deltas) == (1, 0, {})
    assert scheduler.memory.usage.in_use == 0
    assert scheduler.audit() == []
    assert seq.tokens[-1] == END, "what a zombie computed is nobody's"


def test_tokens_go_to_their_frontends_in_columns() -> None:
    scheduler = new()
    added(scheduler, *[sequence(n, client=client, first=30 * n) for n, client in ((1, b"a"), (2, b"b"), (3, b"a"))])
    updates = commit(scheduler, launched(scheduler, 1), [20, 21, 22])
    assert {client: (d.request_ids, d.tokens) for client, d in updates.deltas.items()} == {
        b"a": ([1, 3], [20, 22]),
        b"b": ([2], [21]),
    }
    assert updates.num_tokens == 3


def test_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = new(pages=5)
    added(scheduler, sequence(1, 5, 3), sequence(2, 13, 3, first=40), sequence(3, 1, 1, first=70))
    assert list(scheduler.running) == [1]
    assert [seq.id for seq in scheduler.waiting] == [2, 3], "the small one waits behind the large one"


def test_add_rejects_what_cannot_fit_or_be_queued() -> None:
    scheduler = new(pages=5, waiting=1)
    with pytest.raises(RequestError, match=r"\b5 KV pages of 4\b.* 4\b") as caught:
        scheduler.add(sequence(1, 10, 8))
    assert caught.value.code is ErrorCode.KV_CAPACITY
    room = 1 + scheduler.rows.free
    for number in range(room):
        scheduler.add(sequence(2 + number))
    with pytest.raises(RequestError, match=rf"\b{room} requests\b") as caught:
        scheduler.add(sequence(2 + room))
    assert caught.value.code is ErrorCode.OVERLOADED
    assert scheduler.num_open == room


def test_masks_cover_only_live_constrained_rows() -> None:
    scheduler = new()
    plain, constrained, ended = sequence(1), sequence(2, first=40), sequence(3, first=70)
    constrained.constraint, ended.constraint = FakeConstraint("parity"), FakeConstraint("parity")
    added(scheduler, plain, constrained, ended)
    plan = launched(scheduler, 1)
    scheduler.abort(b"c", 3)
    assert plan.needs_mask
    assert scheduler.masks(plan) == [(constrained.row, constrained.constraint)]


def test_second_outcome_is_an_assertion() -> None:
    scheduler, seq = new(), sequence(1)
    added(scheduler, seq)
    scheduler.abort(b"c", 1)
    with pytest.raises(AssertionError, match="second outcome"):
        scheduler.end(seq, Finished(1, FinishReason.ABORT))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompts", [0, 1])
def test_every_admitted_row_is_served_within_patience(policy: Policy, prompts: int) -> None:
    """Twelve rows have more to compute than a step holds; the bound that `policy` states is kept to the end."""
    scheduler = new(rows=12, pages=400, step=12, chunk=8, policy=policy, prompts=prompts)
    for number in range(1, 40):
        long = number % 3 == 0
        scheduler.add(sequence(number, 90 if long else 5, 2 if long else 30, first=200 * number, priority=number % 2))
    last: dict[int, int] = {}
    worst = step = 0
    while scheduler.num_open:
        step += 1
        last |= {seq.id: step - 1 for seq in scheduler.admit_waiting()}
        plan = launched(scheduler, step)
        for row in plan.rows:
            worst = max(worst, step - last[row.seq_id])
            last[row.seq_id] = step
        commit(scheduler, plan, [20] * len(plan.rows))
    assert 1 <= worst <= MAX_STEPS_SKIPPED + (12 if prompts else 0)
    assert scheduler.audit() == []


def test_static_batch_runs_to_its_end_before_the_next() -> None:
    scheduler = new(rows=3, step=80, chunk=0, static=True, cache=False)
    for number, tokens in ((1, 2), (2, 5), (3, 3), (4, 2), (5, 9)):
        scheduler.add(sequence(number, max_tokens=tokens, first=40 * number))
    batches, step = [], 0
    while scheduler.num_open:
        step += 1
        if moved := scheduler.admit_waiting():
            batches.append(([seq.id for seq in moved], step))
        plan = launched(scheduler, step)
        commit(scheduler, plan, [20] * len(plan.rows))
    assert batches == [([1, 2, 3], 1), ([4, 5], 6)]
    assert step == 5 + 9


def test_policy_changes_at_run_time() -> None:
    scheduler = new(rows=1)
    for number in range(1, 4):
        scheduler.add(sequence(number, priority=number))
    scheduler.set_policy("priority")
    assert [seq.id for seq in scheduler.admit_waiting()] == [3]
    scheduler.set_policy("fcfs")
    assert [seq.id for seq in scheduler.waiting] == [1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_running_sequence_counts_the_steps_that_left_it_out(policy: Policy) -> None:
    scheduler = new(rows=6, pages=200, step=8, chunk=4, policy=policy)
    for number in range(1, 25):
        scheduler.add(sequence(number, prompt=3 + number % 11, max_tokens=6, first=100 * number))
    counted: dict[int, int] = {}
    for step in range(1, 500):
        scheduler.admit_waiting()
        unsteady = any(not seq.in_steady_decode for seq in scheduler.running.values())
        plan = launched(scheduler, step)
        served = {row.seq_id for row in plan.rows}
        # Steady sequences are all in every step, so that only the others can be left out.
        if unsteady:
            counted = {number: 0 if number in served else counted.get(number, 0) + 1 for number in scheduler.running}
        assert [seq.steps_skipped for seq in scheduler.running.values()] == [counted[n] for n in scheduler.running]
        commit(scheduler, plan, [20] * len(plan.rows))
        if not scheduler.num_open:
            break
    assert not scheduler.num_open, "all have ended"
