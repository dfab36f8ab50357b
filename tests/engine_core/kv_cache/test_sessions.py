"""Conversations: what is kept between turns, what goes, and who is refused."""

import pytest

from tandem.engine_core.errors import RequestError
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.kv_pool import evict_unused, occupy, vacate
from tests.support.scheduling import added, commit, launched, new, run, sequence, submitted


def turn(number: int, *prompt: int, session: str = "talk", max_tokens: int = 4, client: bytes = b"c") -> Sequence:
    params = SamplingParams(max_tokens)
    return submitted(number, prompt, params, client=client, session=session)


FIRST = tuple(range(30, 39))


def after_one_turn(pages: int = 40) -> tuple[Scheduler, tuple[int, ...]]:
    """A session of 13 tokens, the last of which was never fed back: three full pages."""
    scheduler = new(pages=pages)
    first = turn(1, *FIRST)
    run(scheduler, first)
    assert scheduler.memory.usage.in_use == scheduler.memory.tree.counts.pinned == 3  # type: ignore[union-attr]
    return scheduler, tuple(first.tokens)


def test_turn_starts_where_the_last_one_ended() -> None:
    scheduler, said = after_one_turn()
    again = turn(2, *said, 40, 41, client=b"another frontend")
    added(scheduler, again)
    assert again.num_scheduled_tokens == 12
    run(scheduler, first_step=30)
    assert scheduler.memory.usage.in_use == 4, "18 tokens by now"
    assert scheduler.audit() == []


def test_session_unpins_nodes_that_no_longer_match() -> None:
    scheduler, said = after_one_turn()
    edited = turn(2, *said[:7], 99, 98, 97)
    added(scheduler, edited)
    assert edited.num_scheduled_tokens == 4
    (session,) = scheduler.memory.sessions.known
    assert session.nodes == edited.cache.nodes[:1]
    assert scheduler.memory.usage.evictable == 2
    run(scheduler, first_step=30)
    assert scheduler.audit() == []


def test_session_outlives_the_rest_of_the_cache() -> None:
    scheduler, said = after_one_turn(pages=1 + 12)
    for number in range(2, 8):
        run(scheduler, sequence(number, prompt=20, max_tokens=4, first=100 * number), first_step=100 * number)
    assert scheduler.memory.usage.num_evicted > 0
    again = turn(9, *said, 40)
    added(scheduler, again)
    assert again.num_scheduled_tokens == 12


def test_under_pressure_the_oldest_idle_one_goes_and_its_next_turn_still_works() -> None:
    scheduler = new(pages=1 + 12)
    talks = {}
    for number, name in enumerate(("old", "young"), 1):
        seq = turn(number, *[token + 100 * number for token in FIRST], session=name)
        run(scheduler, seq, first_step=100 * number)
        talks[name] = tuple(seq.tokens)
    run(scheduler, sequence(3, prompt=25, max_tokens=4, first=900), first_step=300)
    assert [session.name for session in scheduler.memory.sessions.known] == ["young"]
    assert scheduler.memory.sessions.num_evicted == 1
    for number, (name, found) in enumerate((("young", 12), ("old", 0)), 4):
        seq = turn(number, *talks[name], 7, session=name)
        added(scheduler, seq)
        assert seq.num_scheduled_tokens == found, name
        run(scheduler, first_step=100 * number)
        assert seq.outcome == Finished(number, FinishReason.LENGTH)


def test_session_refuses_a_second_turn_in_progress() -> None:
    scheduler = new()
    scheduler.add(turn(1, *FIRST))
    with pytest.raises(RequestError, match="'talk'") as caught:
        scheduler.add(turn(2, *FIRST))
    assert caught.value.code is ErrorCode.SESSION_BUSY
    assert scheduler.num_open == 1
    scheduler.add(turn(3, *FIRST, session="other"))
    scheduler.abort(b"c", 1)
    scheduler.add(turn(4, *FIRST))


def with_a_zombie(scheduler: Scheduler) -> tuple[Sequence, StepPlan]:
    """A first turn that was aborted with one token said, and the step in flight that still holds it."""
    first = turn(1, *FIRST, max_tokens=9)
    added(scheduler, first)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    commit(scheduler, plans[0], [20])
    scheduler.abort(b"c", 1)
    return first, plans[1]


def test_the_next_turn_may_come_while_a_zombie_of_the_last_is_in_flight() -> None:
    scheduler = new()
    _, plan = with_a_zombie(scheduler)
    added(scheduler, turn(2, *FIRST, 20, 40))
    commit(scheduler, plan, [21])
    assert scheduler.audit() == []
    run(scheduler, first_step=3)
    assert scheduler.audit() == []
    assert scheduler.memory.usage.in_use == 3


def test_turn_that_never_ran_leaves_the_session_unchanged() -> None:
    scheduler, said = after_one_turn()
    scheduler.add(turn(2, *said, 40))
    scheduler.abort(b"c", 2)
    again = turn(3, *said, 40)
    added(scheduler, again)
    assert again.num_scheduled_tokens == 12


def test_idle_session_expires() -> None:
    scheduler = new()
    scheduler.advance(100.0)
    run(scheduler, turn(1, *FIRST))
    scheduler.advance(159.9)
    assert len(scheduler.memory.sessions) == 1
    scheduler.advance(160.0)
    assert len(scheduler.memory.sessions) == 0
    assert (scheduler.memory.usage.in_use, scheduler.memory.usage.cached) == (0, 3), "still cached, no longer kept"


def test_session_with_a_turn_in_progress_does_not_expire() -> None:
    scheduler = new()
    scheduler.add(turn(1, *FIRST))
    scheduler.advance(10_000.0)
    assert len(scheduler.memory.sessions) == 1


def test_sessions_are_bounded_by_max_sessions() -> None:
    scheduler = new(waiting=99)
    for number in range(1, 5):
        run(scheduler, turn(number, number, number, number, number, number, session=f"s{number}"))
    run(scheduler, turn(5, 5, session="s5"))
    assert [session.name for session in scheduler.memory.sessions.known] == ["s2", "s3", "s4", "s5"]
    for number in range(6, 10):
        scheduler.add(turn(number, 1, session=f"busy{number}"))
    with pytest.raises(RequestError, match=r"\b4 sessions") as caught:
        scheduler.add(turn(10, 1, session="one more"))
    assert caught.value.code is ErrorCode.OVERLOADED


def test_ended_session_frees_its_pages() -> None:
    scheduler, said = after_one_turn()
    assert not scheduler.memory.sessions.end("nobody")
    assert scheduler.memory.sessions.end("talk")
    assert scheduler.memory.usage.in_use == 0
    busy = turn(2, *said, 40)
    added(scheduler, busy)
    assert scheduler.memory.sessions.end("talk")
    assert len(scheduler.memory.sessions) == 1
    run(scheduler, first_step=30)
    assert busy.outcome == Finished(2, FinishReason.LENGTH)
    assert len(scheduler.memory.sessions) == 0
    assert scheduler.memory.usage.in_use == 0


def test_waiting_turn_gives_up_the_pages_of_its_session() -> None:
    """Every page is kept by a session whose next turn waits: the first of them still gets what it needs."""
    scheduler = new(rows=1, pages=1 + 6)
    for number, name in enumerate("ab", 1):
        run(scheduler, turn(number, *[token + 100 * number for token in FIRST], session=name))
    assert scheduler.memory.usage.in_use == 6
    scheduler.add(turn(3, *range(500, 509), session="a"))
    scheduler.add(turn(4, *range(600, 609), session="b"))
    run(scheduler, first_step=100)
    assert scheduler.audit() == []
    assert not scheduler.num_open


def test_turns_that_never_ran_evict_no_session() -> None:
    scheduler, said = after_one_turn()
    for number in range(2, 10):
        scheduler.add(turn(number, 7, session=f"given up {number}"))
        scheduler.abort(b"c", number)
    assert [session.name for session in scheduler.memory.sessions.known] == ["talk"]
    assert scheduler.memory.sessions.num_evicted == 0
    again = turn(10, *said, 40)
    added(scheduler, again)
    assert again.num_scheduled_tokens == 12


def test_a_turn_that_never_ran_after_its_pages_went_leaves_nothing() -> None:
    """Its session was no longer idle when memory was short, so it does not count as evicted."""
    scheduler, _ = after_one_turn(pages=1 + 6)
    scheduler.add(turn(2, *FIRST, 40))
    occupy(scheduler.memory, 6)
    vacate(scheduler.memory)
    scheduler.abort(b"c", 2)
    assert (len(scheduler.memory.sessions), scheduler.memory.sessions.num_evicted) == (0, 0)
    assert not scheduler.memory.sessions.end("talk")
    assert scheduler.audit() == []


def test_session_without_nodes_is_not_evicted_for_memory() -> None:
    """It is known, older than the other, and not what goes: that would free nothing."""
    scheduler = new(pages=1 + 6)
    run(scheduler, turn(1, 5, max_tokens=2, session="short"))
    run(scheduler, turn(2, *FIRST, session="long"), first_step=9)
    pages = [(session.name, len(session.nodes)) for session in scheduler.memory.sessions.known]
    assert pages == [("short", 0), ("long", 3)]
    occupy(scheduler.memory, 6)
    assert [session.name for session in scheduler.memory.sessions.known] == ["short"]
    assert scheduler.memory.sessions.num_evicted == 1
    assert scheduler.memory.sessions.end("short")


def test_session_keeps_what_a_zombie_has_computed() -> None:
    scheduler = new()
    first, plan = with_a_zombie(scheduler)
    (session,) = scheduler.memory.sessions.known
    assert (session.turn, session.nodes) == (None, first.cache.nodes[:2])
    commit(scheduler, plan, [21])
    assert scheduler.memory.usage.in_use == 2
    assert scheduler.audit() == []


def test_zombie_of_an_ended_session_leaves_its_successor_alone() -> None:
    scheduler = new()
    added(scheduler, turn(1, *FIRST, max_tokens=9))
    plan = launched(scheduler, 1)
    scheduler.memory.sessions.end("talk")
    scheduler.abort(b"c", 1)
    scheduler.add(turn(2, 90, 91, 92))
    commit(scheduler, plan, [20])
    assert [(session.turn, session.nodes) for session in scheduler.memory.sessions.known] == [(2, [])]
    assert (scheduler.memory.usage.in_use, scheduler.audit()) == (0, [])


@pytest.mark.parametrize("admitted", [False, True])
def test_session_that_loses_its_nodes_goes_on_with_its_turn(admitted: bool) -> None:
    """Its turn computes again what was evicted if it had not begun, and the session keeps all of it afterwards."""
    scheduler, said = after_one_turn()
    seq = turn(2, *said, 40)
    scheduler.add(seq)
    if admitted:
        scheduler.admit_waiting()
    assert scheduler.memory.sessions.release_one()
    evict_unused(scheduler.memory)
    run(scheduler, first_step=30)
    assert seq.outcome == Finished(2, FinishReason.LENGTH)
    assert seq.cache.num_cached_tokens == (12 if admitted else 0)
    assert [(session.turn, len(session.nodes)) for session in scheduler.memory.sessions.known] == [(None, 4)]
    assert scheduler.memory.sessions.num_evicted == 0
    assert scheduler.audit() == []


def test_turn_after_its_session_was_evicted_computes_its_prompt_again() -> None:
    scheduler, said = after_one_turn()
    assert scheduler.memory.sessions.release_one()
    evict_unused(scheduler.memory)
    assert (len(scheduler.memory.sessions), scheduler.memory.usage.in_use, scheduler.memory.usage.cached) == (0, 0, 0)
    again = turn(2, *said, 40)
    added(scheduler, again)
    assert again.num_scheduled_tokens == 0


@pytest.mark.parametrize("cache", [True, False])
def test_turn_is_refused_when_sessions_are_off(cache: bool) -> None:
    scheduler = new(cache=cache)
    if cache:
        scheduler.memory.sessions.max_sessions = 0
    with pytest.raises(RequestError, match=r"--prefix-cache on .*--max-sessions ") as caught:
        scheduler.add(turn(1, 5))
    assert caught.value.code is ErrorCode.SESSIONS_OFF
    assert scheduler.num_open == 0
