"""Prompts with a beginning in common: who computes it, who waits, what is kept and what is found."""

from array import array

import pytest

from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, Started
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import added, commit, launched, new, run, sequence


def with_prompt(number: int, *prompt: int, max_tokens: int = 3, namespace: bytes = b"") -> Sequence:
    return Sequence(
        number, b"c", number, array("i", prompt), SamplingParams(max_tokens), frozenset(), namespace=namespace
    )


SYSTEM = tuple(range(100, 112))
"""Three pages of four."""


def test_a_second_prompt_begins_behind_what_is_cached() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    second = with_prompt(2, *SYSTEM, 2, 3)
    added(scheduler, second)
    assert (second.num_scheduled_tokens, second.num_shared_pages, second.num_cached_tokens) == (12, 3, 12)
    (row,) = launched(scheduler, 50).rows
    assert (row.start, row.length, row.samples, row.skipped) == (12, 2, True, 12)
    assert array("i", row.tokens).tolist() == [*SYSTEM, 2, 3], "the device has to know cached tokens, too"
    assert (row.new_pages, row.first_page) == (tuple(second.pages), 0)
    assert scheduler.take_updates().started == [(b"c", Started(2, 12))]
    assert scheduler.memory.queried == 13 + 14
    assert scheduler.memory.hit == 12


def test_the_last_token_is_always_computed() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM))
    again = with_prompt(2, *SYSTEM)
    added(scheduler, again)
    assert again.num_scheduled_tokens == 8, "of three full pages two are taken: the third holds the last token"


def test_what_was_generated_is_found_as_well() -> None:
    scheduler = new()
    first = with_prompt(1, 5, 6, 7, max_tokens=6)
    run(scheduler, first)
    said = list(first.tokens)
    assert len(said) == 9
    turn = with_prompt(2, *said, 8, 8, 8, 8)
    added(scheduler, turn)
    assert turn.num_scheduled_tokens == 8, "the ninth token was never fed back"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_zombies_add_nothing_that_nobody_said(reason: FinishReason) -> None:
    scheduler, seq = new(), with_prompt(1, 5, 6, max_tokens=30)
    added(scheduler, seq)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    commit(scheduler, plans[0], [9])
    plans.append(launched(scheduler, 3))
    scheduler.end(seq, Finished(1, reason))
    for plan in plans[1:]:
        commit(scheduler, plan, [33])
    assert scheduler.memory.cached == 0, "three tokens are known and four were computed: no page is full"
    assert scheduler.audit() == []


def test_prompts_that_arrive_together_share() -> None:
    scheduler = new(step=64, chunk=64)
    first, second, other = (with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2), with_prompt(3, 7, 7, 7, 7, 7))
    added(scheduler, first, second, other)
    assert list(scheduler.running) == [1, 3], "the second waits for pages that the first computes, the third does not"
    launched(scheduler, 1)
    scheduler.admit_waiting()
    assert (second.num_scheduled_tokens, scheduler.memory.in_use) == (12, 3 + 1 + 1 + 2)
    launched(scheduler, 2)
    assert scheduler.audit() == []


def test_prompts_that_part_midway_wait_no_longer_than_they_must() -> None:
    scheduler = new(step=64, chunk=4)
    added(scheduler, with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM[:4], 9, 9, 9, 9, 9))
    for step, admitted in ((1, [1, 2]), (2, [1, 2])):
        launched(scheduler, step)
        scheduler.admit_waiting()
        assert list(scheduler.running) == admitted


def test_choices_share_their_prompt() -> None:
    scheduler = new(step=64, chunk=64, pages=12)
    choices = [with_prompt(number, *SYSTEM, 1, max_tokens=2) for number in range(1, 5)]
    added(scheduler, *choices)
    launched(scheduler, 1)
    scheduler.admit_waiting()
    assert [seq.num_scheduled_tokens for seq in choices] == [13, 12, 12, 12]
    assert scheduler.memory.in_use == 3 + 4


def test_who_computed_what_all_wait_for_may_vanish() -> None:
    scheduler = new(step=4, chunk=4)
    added(scheduler, with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2))
    plan = launched(scheduler, 1)
    scheduler.admit_waiting()
    assert list(scheduler.running) == [1]
    scheduler.abort(b"c", 1)
    scheduler.admit_waiting()
    assert list(scheduler.running) == [], "its step is still in flight, and computes the next page"
    commit(scheduler, plan, [-1])
    scheduler.admit_waiting()
    assert list(scheduler.running) == [2]


def test_salts_share_nothing() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM, 1, namespace=b"a"))
    other, same = with_prompt(2, *SYSTEM, 1, namespace=b"b"), with_prompt(3, *SYSTEM, 1, namespace=b"a")
    added(scheduler, other, same)
    assert (other.num_scheduled_tokens, same.num_scheduled_tokens) == (0, 12)


def test_new_weights_find_nothing_old() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    scheduler.memory.new_weights()
    seq = with_prompt(2, *SYSTEM, 1)
    added(scheduler, seq)
    assert seq.num_scheduled_tokens == 0


def test_a_scored_prompt_is_computed_whole_and_found_by_others() -> None:
    scheduler = new(step=64, chunk=64)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    scored = with_prompt(2, *SYSTEM, 1)
    scored.prompt_logprobs = 0
    queried = scheduler.memory.queried
    run(scheduler, scored, first_step=40)
    assert (scored.num_cached_tokens, scheduler.memory.queried) == (0, queried)
    assert scheduler.memory.cached == 3, "its pages were there already"
    assert scheduler.audit() == []


def test_what_two_computed_is_kept_once() -> None:
    scheduler = new(step=64, chunk=64)
    first, second = with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2, max_tokens=9)
    second.prompt_logprobs = 0
    added(scheduler, first, second)
    plan = launched(scheduler, 1)
    assert second.pages[:3] == first.pages[:3]
    assert scheduler.memory.settling == 3, "its own pages are written by the step in flight"
    assert scheduler.memory.in_use == 3 + 1 + 1 + 3
    commit(scheduler, plan, [20, 21])
    assert (scheduler.memory.settling, scheduler.memory.in_use) == (0, 5)
    rows = {row.seq_id: row for row in launched(scheduler, 2).rows}
    assert (rows[2].new_pages, rows[2].first_page) == (tuple(second.pages), 0), "the device hears of the change"
    assert rows[1].new_pages == ()
    assert scheduler.audit() == []


def overtaken(step: int) -> tuple[Scheduler, Sequence, Sequence]:
    """One prompt whose first chunk is in flight, and an urgent one that computes the same from its beginning."""
    scheduler = new(step=step, chunk=step, policy="priority")
    behind, ahead = with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2)
    ahead.prompt_logprobs, ahead.priority = 0, 5
    added(scheduler, behind)
    launched(scheduler, 1)
    added(scheduler, ahead)
    return scheduler, behind, ahead


def test_a_prompt_goes_on_behind_what_another_has_computed_meanwhile() -> None:
    scheduler, behind, ahead = overtaken(4)
    for step in (2, 3, 4):
        (row,) = launched(scheduler, step).rows
        assert row.seq_id == ahead.id
    assert behind.num_scheduled_tokens == 8, "as far as the other had come when the last step was planned"
    rows = {row.seq_id: row for row in launched(scheduler, 5).rows}
    assert (rows[1].start, rows[1].length, rows[1].skipped) == (12, 1, 8)
    assert array("i", rows[1].tokens).tolist() == [*SYSTEM[4:], 1]
    assert (rows[1].new_pages, rows[1].first_page) == (tuple(behind.pages[1:]), 1)
    assert behind.pages[:3] == ahead.pages[:3]
    assert behind.num_cached_tokens == 8
    assert scheduler.audit() == []


def test_a_page_half_written_is_given_back_when_its_step_has_committed() -> None:
    scheduler, behind, ahead = overtaken(2)
    (mine,) = behind.pages
    plans = [launched(scheduler, step) for step in (2, 3)]
    scheduler.plan_step(4)
    assert behind.num_scheduled_tokens == 4
    assert behind.pages[0] == ahead.pages[0] != mine
    assert scheduler.memory.settling == 1
    assert scheduler.audit() == []
    for plan in plans:
        commit(scheduler, plan, [-1] * len(plan.rows))
    assert scheduler.memory.settling == 0


def test_without_the_cache_nothing_is_kept() -> None:
    scheduler = new(cache=False)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    seq = with_prompt(2, *SYSTEM, 1)
    added(scheduler, seq)
    assert (seq.num_scheduled_tokens, scheduler.memory.cached, scheduler.memory.queried) == (0, 0, 0)
    run(scheduler, first_step=20)
    assert scheduler.memory.pages.used == 0


def test_cached_tokens_do_not_outgrow_a_step() -> None:
    """What a step can bring to the device is bounded, so of many long cached prompts some begin a step later."""
    scheduler = new(step=64, chunk=64, pages=60)
    scheduler.limits = scheduler.planner.limits = type(scheduler.limits)(64, 64, 50, max_uploads=30)
    run(scheduler, sequence(1, 13))
    added(scheduler, *[sequence(number, 13) for number in range(2, 6)])
    assert [len(launched(scheduler, step).rows) for step in (50, 51)] == [2, 4]


def test_nobody_waits_for_who_is_less_urgent() -> None:
    scheduler = new(step=8, chunk=4, pages=60)
    low = with_prompt(1, *SYSTEM, 1)
    low.priority = -1
    added(scheduler, low)
    launched(scheduler, 1)
    urgent, equal = with_prompt(2, *SYSTEM, 2), with_prompt(3, *SYSTEM, 3)
    equal.priority = -1
    added(scheduler, urgent, equal)
    assert list(scheduler.running) == [1, 2]
    assert list(scheduler.waiting) == [equal]


def test_the_refused_are_looked_at_again_when_pages_come_back() -> None:
    scheduler = new(pages=1 + 5)
    first, second = with_prompt(1, *SYSTEM, 1), with_prompt(2, *range(60, 75))
    added(scheduler, first, second)
    plan = launched(scheduler, 1)
    assert scheduler.admit_waiting() == []
    commit(scheduler, plan, [20])
    assert scheduler.admit_waiting() == []
    scheduler.abort(b"c", 1)
    assert scheduler.admit_waiting() == [second]


def test_the_refused_are_looked_at_again_when_more_is_shared() -> None:
    """A less urgent one computes the whole prompt, so nobody waits for it, and there is no room to compute it twice."""
    scheduler = new(pages=1 + 6, chunk=0, step=32)
    low, urgent = with_prompt(1, *SYSTEM, 1, max_tokens=5), with_prompt(2, *SYSTEM, 2)
    low.priority = -1
    added(scheduler, low, urgent)
    assert list(scheduler.running) == [1]
    plan = launched(scheduler, 1)
    assert scheduler.admit_waiting() == [urgent]
    assert urgent.num_cached_tokens == 12
    commit(scheduler, plan, [20])


def test_one_less_urgent_does_not_keep_the_others_from_sharing() -> None:
    scheduler = new(rows=8, step=8, pages=80)
    low, *herd = [with_prompt(number, *SYSTEM, number) for number in range(1, 7)]
    low.priority = -1
    added(scheduler, low)
    launched(scheduler, 1)
    added(scheduler, *herd)
    assert list(scheduler.running) == [1, 2], "one of them computes it for all"


def test_what_was_found_is_given_up_with_what_the_cache_loses() -> None:
    scheduler = new(pages=1 + 8)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    memory, seq = scheduler.memory, with_prompt(2, *SYSTEM, 2)
    seq.tokens.extend(range(300, 300 + 12))
    stranger = 10_000
    pages = memory.take(stranger, 4)
    assert pages is not None
    scheduler.add(seq)
    assert scheduler.memory.admit(seq, 99, 5) is False, "it looks, and is refused"
    assert len(seq.cached_path) == 3
    more = memory.take(stranger, 2)
    assert more is not None
    assert memory.evicted == 1
    memory.pages.release(stranger, [*pages, *more])
    assert scheduler.admit_waiting() == [seq]
    assert (seq.num_shared_pages, seq.num_scheduled_tokens) == (2, 8)
    assert scheduler.audit() == []


def test_what_was_found_of_other_weights_is_given_up() -> None:
    scheduler = new(rows=1)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    seq = with_prompt(2, *SYSTEM, 2)
    scheduler.add(seq)
    assert scheduler.memory.admit(seq, 99, 99) is False
    assert len(seq.cached_path) == 3
    scheduler.memory.new_weights()
    assert scheduler.admit_waiting() == [seq]
    assert seq.num_shared_pages == 0
