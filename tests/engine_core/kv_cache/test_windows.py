"""Sequences in models with windows: pages given up, matches by tails, and what stays reusable under pressure."""

import pytest

from tandem.engine_core.errors import RequestError
from tandem.engine_core.kv_cache.manager import Leaving
from tandem.engine_core.kv_cache.pages import CACHE
from tandem.engine_core.plan import PADDING_PAGE
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.params import SamplingParams
from tests.support.kv_pool import end_sessions, occupy, vacate
from tests.support.scheduling import added, commit, launched, new, run, submitted

WINDOWS = (None, 9, 9)
"""With pages of 4: a match needs the last two pages of the second and third group."""
SYSTEM = tuple(range(100, 132))


def prompted(number: int, *prompt: int, max_tokens: int = 3, session: str = "") -> Sequence:
    return submitted(number, prompt, SamplingParams(max_tokens), session=session)


def held(seq: Sequence) -> list[int]:
    """Return the number of pages that a sequence holds of each group."""
    return [len(table) - table.count(PADDING_PAGE) for table in seq.pages]


def evict(scheduler: Scheduler, left: int) -> None:
    """Evict from the cache until `left` pages of it remain."""
    memory = scheduler.memory
    vacate(memory, occupy(memory, memory.usage.available - left))
    assert memory.usage.cached <= left


def cached_tokens(scheduler: Scheduler, seq: Sequence) -> int:
    """Return the cached tokens with which a sequence starts, after it was computed to its end."""
    run(scheduler, seq, first_step=900 * seq.id)
    assert scheduler.audit() == []
    return seq.cache.num_cached_tokens


def test_pages_outside_the_window_are_given_up_chunk_by_chunk() -> None:
    scheduler = new(step=8, chunk=8, pages=100, windows=WINDOWS, cache=False)
    seq = prompted(1, *SYSTEM, max_tokens=30)
    added(scheduler, seq)
    counts = []
    for step in range(1, 5):
        (row,) = launched(scheduler, step).rows
        assert len(row.new_pages) == 3 * 2
        counts.append(held(seq))
    assert counts == [[2, 2, 2], [4, 2, 2], [6, 2, 2], [8, 2, 2]], "those that the next step reads"
    assert seq.pages[1][:6] == [PADDING_PAGE] * 6
    assert scheduler.memory.usage.in_use == 8 + 2 + 2
    assert scheduler.audit() == []


@pytest.mark.parametrize("depth", [1, 2])
def test_decoding_sequence_holds_its_window_and_two_pages(depth: int) -> None:
    scheduler = new(pages=100, windows=WINDOWS, cache=False)
    seq = prompted(1, *SYSTEM[:5], max_tokens=60)
    added(scheduler, seq)
    flights = [launched(scheduler, step) for step in range(1, depth + 1)]
    for step in range(depth + 1, 60):
        commit(scheduler, flights.pop(0), [20])
        flights.append(launched(scheduler, step))
        assert held(seq)[0] == -(-seq.num_scheduled_tokens // 4)
        assert held(seq)[1] == held(seq)[2] <= 2 + 2
        # What a match at the last full page of the known tokens needs is there.
        full = min(seq.num_scheduled_tokens, len(seq.tokens)) // 4
        assert all(page != PADDING_PAGE for page in seq.pages[1][max(0, full - 2) :])
    assert scheduler.audit() == []


def test_growing_sequence_gives_up_a_page_before_it_gets_the_next() -> None:
    scheduler = new(pages=100, windows=WINDOWS, cache=False)
    seq, step = prompted(1, *SYSTEM[:5], max_tokens=60), 0
    added(scheduler, seq)
    while step < 30 or seq.num_scheduled_tokens < 4 * len(seq.pages[0]):
        commit(scheduler, launched(scheduler, step := step + 1), [20])
    before = held(seq)
    scheduler.memory.grow(seq, seq.num_scheduled_tokens + 1)
    assert held(seq) == [before[0] + 1, before[1], before[2]]


def test_new_pages_come_group_by_group_with_padding_outside_the_window() -> None:
    scheduler = new(pages=100, step=64, chunk=64, windows=WINDOWS)
    run(scheduler, prompted(1, *SYSTEM, 1))
    seq = prompted(2, *SYSTEM, 2)
    added(scheduler, seq)
    (row,) = launched(scheduler, 50).rows
    assert (row.start, row.first_page, len(row.new_pages)) == (32, 0, 3 * 9)
    full, second, third = row.new_pages[:9], row.new_pages[9:18], row.new_pages[18:]
    assert PADDING_PAGE not in full
    for pages in (second, third):
        assert pages[:6] == (PADDING_PAGE,) * 6
        assert PADDING_PAGE not in pages[6:]
    assert len({*full, *second, *third}) == 9 + 3 + 3 + 1
    assert seq.first_pages == [0, 6]


def test_sequence_that_never_fits_is_refused_by_the_pages_of_all_groups() -> None:
    scheduler = new(pages=1 + 20 + 3 + 3, windows=WINDOWS)
    scheduler.add(prompted(1, *SYSTEM, max_tokens=49))
    with pytest.raises(RequestError, match=r"\b27 KV pages of 4\b.* 26\b"):
        scheduler.add(prompted(2, *SYSTEM, max_tokens=50))


def test_whole_prompts_need_pages_of_all_positions() -> None:
    scheduler = new(pages=1 + 20, chunk=0, windows=(None, 5))
    scheduler.add(prompted(1, *SYSTEM, max_tokens=9))
    with pytest.raises(RequestError, match=r"\b22 KV pages"):
        scheduler.add(prompted(2, *SYSTEM, max_tokens=10))


def test_sequence_alone_starts_with_the_pages_that_there_are() -> None:
    """The first chunk needs 24 pages, and the pool has 18: it is computed in smaller ones."""
    scheduler = new(pages=1 + 8 + 5 + 5, step=32, chunk=32, windows=WINDOWS)
    seq = prompted(1, *SYSTEM[:30], max_tokens=3)
    added(scheduler, seq)
    assert seq.id in scheduler.running
    assert launched(scheduler, 1).rows[0].length == 24
    assert scheduler.audit() == []


def test_long_system_prompt_stays_cached_through_four_chats() -> None:
    """Interior pages first would leave the tails of the chats only, and a new chat would match nothing."""
    page, system = 16, tuple(range(32_768))
    windows = (None, 1024, 1024)
    scheduler = new(8, 3300, 4096, 4096, page_size=page, windows=windows)
    cached = [
        cached_tokens(scheduler, prompted(number, *system, *[40_000 + number] * 500, max_tokens=300))
        for number in range(1, 5)
    ]
    assert cached[0] == 0
    assert cached[2:] == [32_768, 32_768]
    # A request without anything in common takes most of the pool. The chats lose their pages before the prompt does.
    memory = scheduler.memory
    vacate(memory, occupy(memory, 3299 - 2048 - 2 * 64 - 20))
    assert cached_tokens(scheduler, prompted(5, *system, *[50_000] * 500)) == 32_768


def test_prompt_is_recomputed_into_own_pages_where_a_tail_was_evicted() -> None:
    scheduler = new(pages=100, windows=WINDOWS)
    run(scheduler, prompted(1, *SYSTEM, 1))
    memory, nodes = scheduler.memory, list(range(1, 9))
    evict(scheduler, 8)
    tree = memory.tree
    assert tree is not None
    full = tree.pages(nodes, 0)
    assert (tree.counts.held, tree.match_points) == (8, []), "all pages of the first group, no others"
    seq = prompted(2, *SYSTEM, 2)
    added(scheduler, seq)
    assert (seq.num_scheduled_tokens, seq.cache.nodes) == (0, [])
    assert set(seq.pages[0]).isdisjoint(full), "it writes no shared page"
    launched(scheduler, 50)
    launched(scheduler, 51)
    assert seq.pages[0][:8] == full, "what it computed is there already"
    assert tree.num_nodes == 8
    assert scheduler.audit() == []
    third = prompted(3, *SYSTEM, 3)
    added(scheduler, third)
    assert third.num_scheduled_tokens == 32


def test_running_prompt_skips_to_where_another_has_computed_the_window() -> None:
    scheduler = new(step=8, chunk=8, pages=100, policy="priority", windows=WINDOWS)
    behind = prompted(1, *SYSTEM, 1)
    ahead = submitted(2, (*SYSTEM, 2), SamplingParams(3), priority=5, prompt_logprobs=0)
    added(scheduler, behind)
    launched(scheduler, 1)
    added(scheduler, ahead)
    for step in range(2, 6):
        launched(scheduler, step)
    (row,) = [row for row in launched(scheduler, 7).rows if row.seq_id == 1]
    assert (row.start, row.skipped) == (32, 24)
    assert behind.first_pages == [0, 6]
    assert [behind.pages[group][6:8] for group in range(3)] == [ahead.pages[group][6:8] for group in range(3)]
    assert scheduler.audit() == []


@pytest.mark.parametrize(("kept", "cached"), [(32, 28), (28, 28), (27, 24)])
def test_end_of_a_prompt_matches_under_pressure(kept: int, cached: int) -> None:
    """The last page of a prompt of whole pages is computed again, and a template may leave out its last tokens."""
    scheduler = new(pages=100, step=64, chunk=64, windows=WINDOWS)
    run(scheduler, prompted(1, *SYSTEM, max_tokens=40))
    memory = scheduler.memory
    assert memory.tree is not None
    memory.pages.release(CACHE, memory.tree.evict(sum([2 * len(pages.loose) for pages in memory.tree.classes])))
    assert not any(pages.loose for pages in memory.tree.classes)
    assert cached_tokens(scheduler, prompted(2, *SYSTEM[:kept], *[9] * (32 - kept))) == cached


def test_shared_page_is_evictable_once_its_last_reader_has_passed_it() -> None:
    scheduler = new(pages=100, step=64, chunk=64, windows=WINDOWS)
    run(scheduler, prompted(1, *SYSTEM, 1))
    tree = scheduler.memory.tree
    assert tree is not None
    fast, slow = prompted(2, *SYSTEM, *[2] * 16, max_tokens=40), prompted(3, *SYSTEM, 3, max_tokens=40)
    added(scheduler, fast, slow)
    last = fast.cache.nodes[7]
    assert [tree.num_readers(last, kind) for kind in (0, 1)] == [2, 2]
    plan = launched(scheduler, 50)
    assert [tree.num_readers(last, kind) for kind in (0, 1)] == [2, 1], "the window of one begins behind it"
    leaving = Leaving()
    assert sum([scheduler.memory.add_leaving(seq, leaving) for seq in (fast, slow)]) == scheduler.memory.usage.in_use
    for step in range(51, 65):
        commit(scheduler, plan, [20, 21])
        plan = launched(scheduler, step)
    assert [tree.num_readers(last, kind) for kind in (0, 1)] == [2, 0]
    assert tree.classes[1].held[last], "it stays until its memory is needed"
    vacate(scheduler.memory, occupy(scheduler.memory, scheduler.memory.usage.available))
    assert not tree.classes[1].held[last]
    assert tree.match(b"", fast.tokens, 8) == [], "of the system prompt alone, only the first group's pages are left"
    assert scheduler.audit() == []


def test_turns_of_a_session_start_from_its_tail() -> None:
    scheduler = new(pages=60, windows=WINDOWS)
    first = prompted(1, *SYSTEM, max_tokens=9, session="talk")
    run(scheduler, first)
    memory = scheduler.memory
    assert memory.usage.in_use == 10 + 2 * 2, "all pages of the first group, and the tails"
    assert memory.num_kept_pages(memory.sessions.known[0]) == 14
    vacate(memory, occupy(memory, memory.usage.free + memory.usage.evictable))
    second = prompted(2, *first.tokens, 7, 7, 7, max_tokens=9, session="talk")
    assert cached_tokens(scheduler, second) == 40
    shorter = prompted(3, *SYSTEM[:18], 7, 7, 7, session="talk")
    assert cached_tokens(scheduler, shorter) in (0, 16), "an earlier position, if its pages are still there"
    end_sessions(memory)
    assert (memory.usage.in_use, scheduler.audit()) == (0, [])


def test_ended_session_counts_as_a_use_of_its_tail() -> None:
    """So the tail of a prompt that was computed after the session's last turn is evicted before the session's."""
    scheduler, other = new(pages=100, windows=WINDOWS), range(500, 532)
    first = prompted(1, *SYSTEM, max_tokens=9, session="talk")
    run(scheduler, first)
    run(scheduler, prompted(2, *other), first_step=200)
    memory = scheduler.memory
    assert memory.tree is not None
    end_sessions(memory)
    kept = memory.tree.match(b"", first.tokens, 10)
    while memory.tree.match(b"", submitted(3, other, SamplingParams(1)).tokens, 8):
        memory.pages.release(CACHE, memory.tree.evict(1))
    assert len(kept) == 10 and memory.tree.match(b"", first.tokens, 10) == kept


def test_preempted_sequence_continues_from_its_last_page() -> None:
    scheduler = new(pages=60, windows=WINDOWS)
    seq = prompted(1, *SYSTEM, max_tokens=20)
    added(scheduler, seq)
    for step in range(1, 9):
        plan = launched(scheduler, step)
        commit(scheduler, plan, [20] * len(plan.rows))
    scheduler.preempt(seq)
    scheduler.admit_waiting()
    assert seq.id in scheduler.running
    assert seq.num_scheduled_tokens == (len(seq.tokens) - 1) // 4 * 4 > 32
    assert scheduler.audit() == []


def test_released_pages_are_counted_over_all_groups() -> None:
    scheduler = new(pages=100, step=64, chunk=64, windows=WINDOWS)
    first, second = prompted(1, *SYSTEM, 1, max_tokens=9), prompted(2, *SYSTEM, 2, max_tokens=9)
    added(scheduler, first)
    launched(scheduler, 1)
    memory = scheduler.memory
    assert memory.num_released(first, {}) == memory.usage.in_use == 9 + 3 + 3
    added(scheduler, second)
    launched(scheduler, 2)
    assert [held(seq) for seq in (first, second)] == [[9, 3, 3], [9, 3, 3]]
    assert [memory.num_released(seq, {}) for seq in (first, second)] == [3, 3]
    assert [memory.num_shared_pages(seq) for seq in (first, second)] == [12, 12]
    assert memory.usage.in_use == 8 + 2 * 2 + 2 * 3
    before = memory.usage.available
    scheduler.abort(b"c", 1)
    scheduler.abort(b"c", 2)
    scheduler.abandon()
    assert memory.usage.available - before == 18
    assert scheduler.audit() == []


def test_preempted_sequence_waits_for_the_pages_of_its_whole_prompt() -> None:
    """Those of the first group: the others need pages of one chunk at a time."""
    scheduler = new(pages=1 + 12, windows=WINDOWS, cache=False)
    memory, seq = scheduler.memory, prompted(1, *SYSTEM)
    taken = occupy(memory, 1)
    assert not memory.admit(seq, 8, 0, whole=True)
    vacate(memory, taken)
    assert memory.admit(seq, 8, 0, whole=True)
    assert held(seq) == [2, 2, 2]


def test_idle_session_ends_where_its_nodes_are_needed() -> None:
    scheduler = new(pages=1 + 30, step=64, chunk=64, windows=(5,))
    memory = scheduler.memory
    assert memory.tree is not None
    memory.tree.max_nodes = 12
    run(scheduler, prompted(1, *SYSTEM, session="talk"))
    assert memory.tree.num_nodes == 8
    run(scheduler, prompted(2, *range(500, 533)), first_step=200)
    assert (memory.tree.num_nodes, len(memory.sessions), memory.sessions.num_evicted) == (12, 0, 1)
    assert cached_tokens(scheduler, prompted(3, *range(500, 533))) == 32


def test_number_of_nodes_is_bounded_where_all_layers_have_windows() -> None:
    scheduler = new(pages=1 + 8, step=64, chunk=64, windows=(5,))
    for number in range(1, 9):
        run(
            scheduler,
            prompted(number, *range(1000 * number, 1000 * number + 20), max_tokens=60),
            first_step=number * 100,
        )
        tree = scheduler.memory.tree
        assert tree is not None
        assert tree.num_nodes <= 8 * 9
    assert tree.counts.held <= 8
    assert scheduler.audit() == []
