"""Growth on demand, preemption when pages run out, and progress under any load."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.scheduler.preemption import Reclaim
from tandem.engine_core.scheduler.queue import ARRIVALS_PER_PRIORITY, seniority
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.engine_options import POLICIES, Policy
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tests.support.kv_pool import occupy, vacate
from tests.support.scheduling import END, added, commit, launched, new, run, sequence


def test_pages_are_allocated_as_rows_grow() -> None:
    scheduler, seq = new(), sequence(1, prompt=3, max_tokens=8)
    added(scheduler, seq)
    pages = []
    for step in range(1, 9):
        plan = launched(scheduler, step)
        pages.append(seq.num_pages)
        assert plan.rows[0].new_pages == (tuple(seq.pages[0][-1:]) if step in (1, 3, 7) else ())
        assert plan.is_unconstrained_decode == (step > 1)
        commit(scheduler, plan, [20])
    assert pages == [1, 1, 2, 2, 2, 2, 3, 3]
    assert seq.outcome is not None
    assert scheduler.audit() == []


def test_decode_evicts_cached_pages_before_it_waits() -> None:
    scheduler = new(pages=1 + 4)
    run(scheduler, sequence(1, prompt=9, max_tokens=1))
    assert scheduler.memory.usage.cached == 2
    run(scheduler, sequence(2, prompt=3, max_tokens=12, first=60), first_step=20)
    assert scheduler.preemptions == 0
    assert scheduler.memory.usage.num_evicted == 2


def crowded(newer_priority: int = 0) -> tuple[Scheduler, Sequence, Sequence]:
    """Return two sequences with two pages each, of which the older needs a third next; another owner holds the rest."""
    scheduler = new(pages=1 + 5)
    older = sequence(1, prompt=7, max_tokens=8)
    newer = sequence(2, prompt=6, max_tokens=8, first=60, priority=newer_priority)
    added(scheduler, older, newer)
    occupy(scheduler.memory, 1)
    return scheduler, older, newer


def alone(scheduler: Scheduler) -> None:
    """Free the other owner's pages and check that everything else is consistent."""
    vacate(scheduler.memory)
    assert scheduler.audit() == []


def test_preemption_picks_the_newest_sequence() -> None:
    scheduler, older, newer = crowded()
    for step in (1, 2):
        commit(scheduler, launched(scheduler, step), [20, 21])
    plan = launched(scheduler, 3)
    assert [row.seq_id for row in plan.rows] == [1]
    assert (newer.preemptions, newer.row, newer.pages, newer.inflight) == (1, -1, (), 0)
    assert list(scheduler.waiting) == [newer]
    assert scheduler.memory.usage.cached == 1 + 1, "the first page of each: the newer's stays until it is needed"
    assert scheduler.admit_waiting() == [], "two pages and a reserve of one are not to be had"
    alone(scheduler)
    commit(scheduler, plan, [20])
    run(scheduler, first_step=4)
    assert older.outcome == Finished(1, FinishReason.LENGTH)
    assert newer.outcome == Finished(2, FinishReason.LENGTH)
    assert list(newer.tokens) == [*range(60, 66), 21, 21, *[20] * 6]
    assert scheduler.audit() == []


def test_preemption_picks_the_lowest_priority_first() -> None:
    scheduler, older, newer = crowded(newer_priority=1)
    commit(scheduler, launched(scheduler, 1), [20, 21])
    commit(scheduler, launched(scheduler, 2), [20, 21])
    assert [row.seq_id for row in launched(scheduler, 3).rows] == [2], "the older waits: it needs a page, and is junior"
    assert (older.preemptions, newer.preemptions) == (0, 0)
    commit(scheduler, scheduler.plan_step(3) or launched(scheduler, 3), [21])
    assert [row.seq_id for row in launched(scheduler, 4).rows] == [2]
    assert (older.preemptions, newer.preemptions) == (1, 0)
    alone(scheduler)


def test_preempted_sequence_commits_what_is_in_flight() -> None:
    scheduler, _, newer = crowded()
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    commit(scheduler, plans[0], [20, 21])
    assert scheduler.plan_step(3) is None, "the older waits for pages, the newer is to run no more"
    assert (newer.inflight, newer.num_inflight_samples, newer.generated) == (1, 1, 1)
    assert newer in scheduler.held
    assert scheduler.admit_waiting() == []
    commit(scheduler, plans[1], [22, 23])
    assert list(newer.tokens[-2:]) == [21, 23]
    assert newer not in scheduler.held
    assert list(scheduler.waiting) == [newer]
    assert [row.seq_id for row in launched(scheduler, 3).rows] == [1]
    alone(scheduler)


@pytest.mark.parametrize("ending", ["token", "abort", "fail_all"])
def test_preempted_sequence_may_end_before_it_is_queued_again(ending: str) -> None:
    scheduler, _, newer = crowded()
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    commit(scheduler, plans[0], [20, 21])
    assert scheduler.plan_step(3) is None
    if ending == "abort":
        scheduler.abort(b"c", 2)
    if ending == "fail_all":
        scheduler.fail_all(ErrorCode.SHUTTING_DOWN, "x")
        scheduler.abandon()
        assert isinstance(newer.outcome, Failure)
    else:
        commit(scheduler, plans[1], [22, END])
        assert isinstance(newer.outcome, Finished)
        assert [row.seq_id for row in launched(scheduler, 3).rows] == [1]
    assert not list(scheduler.waiting)
    alone(scheduler)


def test_abort_reaches_a_preempted_sequence_in_the_queue() -> None:
    scheduler, _, newer = crowded()
    for step in (1, 2):
        commit(scheduler, launched(scheduler, step), [20, 21])
    launched(scheduler, 3)
    scheduler.abort(b"c", 2)
    assert not list(scheduler.waiting)
    assert newer.outcome == Finished(2, FinishReason.ABORT)
    assert [seq.id for seq in scheduler.take_updates().ended] == [2]


def test_row_waits_for_pages_that_steps_in_flight_give_back() -> None:
    """A zombie's pages come back with its step: no sequence is preempted for them, and no other gets them."""
    scheduler, _, _ = crowded()
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    commit(scheduler, plans[0], [20, END])
    assert scheduler.plan_step(3) is None
    assert scheduler.preemptions == 0
    scheduler.add(sequence(3, prompt=2, max_tokens=1, first=90))
    commit(scheduler, plans[1], [21, 22])
    assert scheduler.admit_waiting() == [], "two pages are free, but the first has not had its page yet"
    assert [row.seq_id for row in launched(scheduler, 3).rows] == [1]
    alone(scheduler)
    assert [seq.id for seq in scheduler.admit_waiting()] == [3]


def test_prompt_chunk_shrinks_to_the_available_pages() -> None:
    scheduler = new(pages=1 + 7, step=12, chunk=12)
    prompt = sequence(1, prompt=24, max_tokens=2)
    added(scheduler, prompt)
    assert launched(scheduler, 1).rows[0].length == 12
    (page, *rest) = occupy(scheduler.memory, 4)
    assert scheduler.plan_step(2) is None
    vacate(scheduler.memory, [page])
    (row,) = launched(scheduler, 2).rows
    assert (row.start, row.length, row.samples) == (12, 4, False)
    vacate(scheduler.memory, rest)
    assert launched(scheduler, 3).rows[0].length == 8


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_overload_makes_progress_without_thrashing(depth: int, cache: bool) -> None:
    """Far more than fits arrives at once, and each sequence needs half of the pool.

    They end about in order, and the positions computed in vain stay below the positions asked for.
    """
    scheduler = new(rows=8, pages=1 + 24, step=32, chunk=16, waiting=99, cache=cache)
    total, computed, steps, flights = 30, 0, count(1), []
    ended: list[int] = []
    for number in range(1, total + 1):
        scheduler.add(sequence(number, prompt=10, max_tokens=38, first=100 * number))
    while scheduler.num_open or flights:
        scheduler.admit_waiting()
        senior = min(scheduler.running.values(), key=seniority, default=None)
        before = None if senior is None else senior.num_scheduled_tokens + senior.num_inflight_samples
        plan = scheduler.plan_step(next(steps))
        if plan is not None:
            scheduler.on_launch(plan)
            computed += plan.total_tokens
            flights.append(plan)
        if senior is not None and senior.outcome is None and before is not None:
            assert senior.preemptions == 0 or senior.id not in ended
            assert senior.id in scheduler.running, f"{senior} is senior to all and was preempted"
        if plan is None or len(flights) == depth:
            done = flights.pop(0)
            ended += [seq.id for seq in commit(scheduler, done, [20] * len(done.rows)).ended]
        ended += [seq.id for seq in scheduler.take_updates().ended]
        assert scheduler.audit() == []
    assert sorted(ended) == list(range(1, total + 1))
    assert all(abs(place - number) <= 8 for place, number in enumerate(ended, 1)), f"order of ends: {ended}"
    assert scheduler.preemptions > 0
    assert computed <= 2 * total * 47, f"{computed} positions for {total * 47} asked for"


LOADS = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(-1, 1), st.integers(1, 9))
"""Prompt length, tokens, priority, and the prompt whose beginning it shares."""


@given(
    st.lists(LOADS, min_size=1, max_size=8),
    st.integers(15, 24),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(POLICIES),
    st.sampled_from([0, 1]),
    st.sampled_from([8, 16]),
)
def test_every_load_whose_sequences_fit_alone_ends(
    loads: list[tuple[int, int, int, int]],
    pages: int,
    depth: int,
    cache: bool,
    policy: Policy,
    prompts: int,
    chunk: int,
) -> None:
    scheduler = new(rows=6, pages=1 + pages, step=16, chunk=chunk, cache=cache, policy=policy, prompts=prompts)
    sequences = [
        sequence(number, prompt, tokens, first=100 * beginning, priority=priority)
        for number, (prompt, tokens, priority, beginning) in enumerate(loads, 1)
    ]
    run(scheduler, *sequences, depth=depth)
    assert all(seq.outcome == Finished(seq.id, FinishReason.LENGTH) for seq in sequences)
    assert scheduler.audit() == []


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first"])
def test_sequence_with_pages_runs_though_the_policy_prefers_one_without(policy: Policy) -> None:
    scheduler = new(pages=1 + 12, step=8, chunk=8, policy=policy)
    older, newer = sequence(1, 20, 12), sequence(2, 24, 20, first=60)
    run(scheduler, older, newer)
    assert older.preemptions == 0


def test_prompt_without_pages_does_not_block_the_only_prompt_slot() -> None:
    scheduler = new(pages=1 + 12, step=16, chunk=4, prompts=1, policy="priority")
    run(scheduler, sequence(1, 30, 8), sequence(2, 28, 8, first=60, priority=1), sequence(3, 30, 6, first=100))
    assert scheduler.audit() == []


def test_juniors_that_share_all_pages_are_preempted_together() -> None:
    scheduler = new(pages=1 + 7, step=32, chunk=16)
    long, *twins = sequence(1, 21, 7), sequence(2, 4, 4, first=60), sequence(3, 4, 4, first=60)
    run(scheduler, long, *twins)
    assert long.preemptions == 0
    assert all(seq.outcome == Finished(seq.id, FinishReason.LENGTH) for seq in twins)


@pytest.mark.parametrize("leaving", [1, 2, 3])
def test_pages_that_leaving_sequences_share_come_back_once_and_with_the_last(leaving: int) -> None:
    scheduler = new(step=32)
    seqs = [sequence(number, prompt=10, max_tokens=4) for number in (1, 2, 3)]
    for step, seq in enumerate(seqs, start=1):
        added(scheduler, seq)
        launched(scheduler, step)
    memory = scheduler.memory
    assert [len(seq.cache.nodes) for seq in seqs] == [2, 2, 2], "two full pages of the prompt are shared"
    running = {seq.id: seq for seq in seqs[leaving:]}
    reclaim = Reclaim(memory, running, seqs)
    own = sum(seq.num_pages - 2 for seq in seqs[:leaving])
    assert reclaim.reclaimable == own + (2 if leaving == 3 else 0)
    assert memory.usage.in_use == 2 + sum(seq.num_pages - 2 for seq in seqs)


def test_low_priority_is_overtaken_by_a_bounded_number_of_arrivals() -> None:
    """Sequences of a higher priority keep coming, and the pool holds the low one and little else."""
    scheduler, low = new(rows=16, pages=1 + 64, step=64), sequence(1, 188, 31, priority=-1)
    scheduler.add(low)
    arrivals = step = computed = 0
    while low.outcome is None:
        while len(scheduler.waiting) < 4:
            arrivals += 1
            scheduler.add(sequence(1 + arrivals, 3, 12, first=1000 * arrivals))
        assert arrivals < 2 * ARRIVALS_PER_PRIORITY, f"{low} has not ended after {arrivals} arrivals"
        scheduler.admit_waiting()
        step += 1
        plan = launched(scheduler, step)
        computed += sum([row.length for row in plan.rows if row.seq_id == low.id])
        commit(scheduler, plan, [20] * len(plan.rows))
    assert low.preemptions > 0
    assert computed < 3 * low.total_len
