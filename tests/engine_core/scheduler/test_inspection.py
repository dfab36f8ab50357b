"""Snapshots of the scheduler."""

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.inspection import MAX_LISTED, inspect, oldest_wait
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.stats import new_stats
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.events import SEQUENCE_STATES, InspectedSequence, Speculation
from tests.fakes.constraint import FakeConstraint
from tests.support.kv_pool import evict_unused
from tests.support.scheduling import END, added, commit, launched, new, run, sequence


def facts_of(scheduler: Scheduler, now: float = 0.0) -> dict[int, InspectedSequence]:
    return {seq.request_id: seq for seq in inspect(scheduler, 1, new_stats(), now).sequences}


def test_inspection_lists_every_sequence_with_its_state() -> None:
    scheduler = new(rows=5, chunk=8, step=40)
    run(scheduler, sequence(1, session="talk"))
    long, short, zombie = sequence(2, 60, first=100), sequence(3, 4, 9, first=200), sequence(4, 3, 9, first=300)
    leaving = sequence(5, 3, 9, first=400)
    added(scheduler, long, short, zombie, leaving)
    plans = [launched(scheduler, 10), launched(scheduler, 11)]
    commit(scheduler, plans[0], [-1, 20, END, 20])
    scheduler.preempt(leaving)
    follower = sequence(6, 56, first=100)
    follower.arrival = follower.queued_at = 95.0
    compiling = sequence(8, first=600)
    compiling.compiling = True
    added(scheduler, follower, compiling)
    scheduler.add(sequence(7, first=500))
    seen = inspect(scheduler, 8, new_stats(), 100.0)
    assert [(sequence.request_id, sequence.state) for sequence in seen.sequences] == [
        (2, "prefill"), (3, "decode"), (4, "zombie"), (5, "leaving"), (6, "following"), (7, "waiting"),
        (8, "compiling"),
    ]  # fmt: skip
    assert {sequence.state for sequence in seen.sequences} == {*SEQUENCE_STATES}, "all of them"
    facts = {sequence.request_id: sequence for sequence in seen.sequences}
    assert (facts[2].prompt_len, facts[2].launched, facts[2].pages, facts[2].shared_pages) == (60, 38, 10, 9)
    assert (facts[3].generated, facts[3].row > 0, facts[3].client) == (1, True, b"c".hex())
    assert (facts[6].age, facts[6].wait, facts[6].row) == (5.0, 5.0, -1)
    assert [number for number, seq in facts.items() if seq.wait] == [6, 7, 8]
    assert (facts[5].preemptions, seen.omitted, seen.policy, seen.call) == (0, 0, "fcfs", 8)
    (session,) = seen.sessions
    assert (session.name, session.busy, session.pages, session.idle) == ("talk", False, 1, 100.0)
    assert seen.pages_free == scheduler.memory.pages.free
    assert decode_event(encode(seen)) == seen


def test_inspection_changes_nothing() -> None:
    scheduler = new()
    added(scheduler, sequence(1, 20), sequence(2))
    late = sequence(3, 24)
    scheduler.add(late)
    before = [repr(seq) for seq in scheduler.held]
    assert facts_of(scheduler)[3].state == "waiting", "nobody has looked for its pages"
    assert (late.cache.awaited_key, late.cache.matched) == (b"", [])
    assert [repr(seq) for seq in scheduler.held] == before
    assert scheduler.audit() == []
    scheduler.admit_waiting()
    assert facts_of(scheduler)[3].state == "following"


def test_forced_tokens_count_as_decoding() -> None:
    scheduler = new()
    seq = sequence(1, 5, 9)
    seq.constraint = FakeConstraint("runs 3")
    added(scheduler, seq)
    assert facts_of(scheduler)[1].state == "prefill"
    launched(scheduler, 1)
    assert facts_of(scheduler)[1].state == "decode"
    seq = sequence(2, 5, 9, first=300)
    added(scheduler, seq)
    commit(scheduler, launched(scheduler, 2), [20, 20])
    seq.tokens.append(21)
    seq.jumped()
    assert facts_of(scheduler)[2].state == "decode"


def test_preempted_sequence_counts_as_prefill_again() -> None:
    scheduler = new(step=4)
    seq = sequence(1, 4, 12)
    added(scheduler, seq)
    for step in range(1, 7):
        commit(scheduler, launched(scheduler, step), [20])
    assert facts_of(scheduler)[1].state == "decode"
    scheduler.preempt(seq)
    evict_unused(scheduler.memory)
    scheduler.admit_waiting()
    states = []
    for step in range(7, 11):
        states.append(facts_of(scheduler)[1].state)
        commit(scheduler, launched(scheduler, step), [20])
    assert states == ["prefill", "prefill", "prefill", "decode"], "4 of 10 tokens a step"


def test_oldest_wait_covers_queued_and_compiling_sequences() -> None:
    """A wait begins with the arrival, or with the return after a preemption, and includes compilation."""
    scheduler = new(rows=1)
    assert oldest_wait(scheduler, 50.0) == 0.0
    first, second, compiling = sequence(1, max_tokens=9), sequence(2, first=50), sequence(3, first=90)
    second.queued_at, compiling.queued_at, compiling.compiling = 12.0, 11.0, True
    added(scheduler, first, second)
    assert oldest_wait(scheduler, 50.0) == 38.0
    scheduler.add(compiling)
    assert oldest_wait(scheduler, 50.0) == 39.0
    scheduler.set_constraint(3, FakeConstraint("parity"))
    assert oldest_wait(scheduler, 50.0) == 39.0
    scheduler.advance(40.0)
    scheduler.preempt(first)
    facts = facts_of(scheduler, 50.0)
    assert {number: (seq.age, seq.wait) for number, seq in facts.items()} == {
        1: (50.0, 10.0), 2: (50.0, 38.0), 3: (50.0, 39.0),
    }  # fmt: skip
    scheduler.abort(b"c", 2)
    scheduler.abort(b"c", 3)
    assert oldest_wait(scheduler, 50.0) == 10.0
    scheduler.admit_waiting()
    assert oldest_wait(scheduler, 50.0) == 0.0


def test_inspection_truncates_a_long_queue() -> None:
    scheduler = new(rows=1, waiting=1000)
    added(scheduler, *[sequence(number, first=number) for number in range(MAX_LISTED + 9)])
    seen = inspect(scheduler, 1, new_stats(), 0.0)
    assert (len(seen.sequences), seen.omitted) == (1 + MAX_LISTED, 8)


def test_inspection_shows_how_steps_draft_and_what_was_right() -> None:
    scheduler = new(drafts=DraftPolicy((1, 2, 3), 3))
    added(scheduler, sequence(1, max_tokens=20))
    commit(scheduler, launched(scheduler, 1), [50])
    scheduler.commit(launched(scheduler, 2), StepResult([3], [20, 21, 22], num_drafts=[3]))
    seen = inspect(scheduler, 1, new_stats(), 0.0)
    assert seen.speculation == Speculation("ngram", 3, False)
    assert (seen.sequences[0].drafted, seen.sequences[0].accepted) == (3, 2)
    assert decode_event(encode(seen)) == seen
    adaptive = inspect(new(drafts=DraftPolicy((1, 2, 3, 5, 7))), 1, new_stats(), 0.0)
    assert adaptive.speculation == Speculation("ngram", 7, True)
    assert inspect(new(), 1, new_stats(), 0.0).speculation is None
