"""Prompts with a beginning in common: who computes it, who waits, what is kept and what is found."""

from array import array

import pytest

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, Started
from tandem.protocol.params import SamplingParams
from tests.support.kv_pool import drop_page, occupy, vacate
from tests.support.scheduling import added, commit, launched, new, run, sequence, submitted


def with_prompt(number: int, *prompt: int, max_tokens: int = 3, salt: str = "", **fields: int) -> Sequence:
    return submitted(number, prompt, SamplingParams(max_tokens), cache_salt=salt, **fields)


SYSTEM = tuple(range(100, 112))
"""Three pages of four."""


def nodes_of(memory: KVManager, tokens: tuple[int, ...]) -> list[int]:
    """Return the complete nodes that hold the full pages of these tokens."""
    assert memory.tree is not None
    return memory.tree.match(b"", array("i", tokens), len(tokens) // 4)


def test_second_prompt_starts_after_its_cached_prefix() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    second = with_prompt(2, *SYSTEM, 2, 3)
    added(scheduler, second)
    assert (second.num_scheduled_tokens, len(second.cache.nodes), second.cache.num_cached_tokens) == (12, 3, 12)
    (row,) = launched(scheduler, 50).rows
    assert (row.start, row.length, row.samples, row.skipped) == (12, 2, True, 12)
    assert array("i", row.tokens).tolist() == [*SYSTEM, 2, 3], "the device has to know cached tokens, too"
    assert (row.new_pages, row.first_page) == (tuple(second.pages[0]), 0)
    assert scheduler.take_updates().started == [(b"c", Started(2, 12))]
    assert scheduler.memory.num_queried_tokens == 13 + 14
    assert scheduler.memory.num_hit_tokens == 12


def test_last_prompt_token_is_always_computed() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM))
    again = with_prompt(2, *SYSTEM)
    added(scheduler, again)
    assert again.num_scheduled_tokens == 8, "of three full pages two are taken: the third holds the last token"


def test_generated_tokens_are_cached_as_well() -> None:
    scheduler = new()
    first = with_prompt(1, 5, 6, 7, max_tokens=6)
    run(scheduler, first)
    said = list(first.tokens)
    assert len(said) == 9
    turn = with_prompt(2, *said, 8, 8, 8, 8)
    added(scheduler, turn)
    assert turn.num_scheduled_tokens == 8, "the ninth token was never fed back"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_zombies_cache_no_tokens_that_were_not_committed(reason: FinishReason) -> None:
    scheduler, seq = new(), with_prompt(1, 5, 6, max_tokens=30)
    added(scheduler, seq)
    plans = [launched(scheduler, 1), launched(scheduler, 2)]
    commit(scheduler, plans[0], [9])
    plans.append(launched(scheduler, 3))
    scheduler.end(seq, Finished(1, reason))
    for plan in plans[1:]:
        commit(scheduler, plan, [33])
    assert scheduler.memory.usage.cached == 0, "three tokens are known and four were computed: no page is full"
    assert scheduler.audit() == []


def test_prompts_that_arrive_together_share_their_prefix() -> None:
    scheduler = new(step=64, chunk=64)
    first, second, other = (with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2), with_prompt(3, 7, 7, 7, 7, 7))
    added(scheduler, first, second, other)
    assert list(scheduler.running) == [1, 3], "the second waits for pages that the first computes, the third does not"
    launched(scheduler, 1)
    scheduler.admit_waiting()
    assert (second.num_scheduled_tokens, scheduler.memory.usage.in_use) == (12, 3 + 1 + 1 + 2)
    launched(scheduler, 2)
    assert scheduler.audit() == []


def test_prompts_that_diverge_wait_only_for_their_common_pages() -> None:
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
    assert scheduler.memory.usage.in_use == 3 + 4


def test_waiters_go_on_when_the_producer_is_aborted() -> None:
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


def test_sequences_of_different_salts_share_no_pages() -> None:
    scheduler = new()
    run(scheduler, with_prompt(1, *SYSTEM, 1, salt="a"))
    other, same = with_prompt(2, *SYSTEM, 1, salt="b"), with_prompt(3, *SYSTEM, 1, salt="a")
    added(scheduler, other, same)
    assert (other.num_scheduled_tokens, same.num_scheduled_tokens) == (0, 12)


def test_prefix_match_ends_before_a_node_without_its_page() -> None:
    scheduler = new()
    first = with_prompt(1, *SYSTEM, 1)
    run(scheduler, first)
    memory = scheduler.memory
    second = nodes_of(memory, SYSTEM)[1]
    drop_page(memory, second)
    assert (memory.usage.cached, memory.usage.evictable, memory.usage.num_evicted) == (2, 2, 1)
    seq = with_prompt(2, *SYSTEM, 1)
    added(scheduler, seq)
    assert (seq.num_scheduled_tokens, len(seq.cache.nodes)) == (4, 1)
    assert scheduler.audit() == []
    run(scheduler, first_step=20)
    assert nodes_of(memory, SYSTEM)[1] == second, "the node has a page again, that of who computed its tokens"
    assert (memory.usage.cached, memory.usage.in_use) == (3, 0)
    assert scheduler.audit() == []


def test_pages_behind_a_node_without_its_page_are_kept_once() -> None:
    """The node after the gap is still there: the sequence that fills the gap reads its page instead of its own."""
    scheduler = new(step=64, chunk=64)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    memory = scheduler.memory
    nodes = nodes_of(memory, SYSTEM)
    assert memory.tree is not None
    kept = memory.tree.pages(nodes)
    drop_page(memory, nodes[1])
    seq = with_prompt(2, *SYSTEM, 2, max_tokens=9)
    added(scheduler, seq)
    own = list(seq.pages[0])
    plan = launched(scheduler, 50)
    assert seq.cache.nodes == nodes
    assert seq.pages[0][:3] == [kept[0], own[1], kept[2]]
    assert memory.usage.in_use == 4, "the third page that it computed is free again"
    commit(scheduler, plan, [20])
    assert scheduler.audit() == []


def test_nodes_that_are_read_or_kept_lose_no_page() -> None:
    scheduler = new()
    seq = with_prompt(1, *SYSTEM, 1)
    added(scheduler, seq)
    launched(scheduler, 1)
    with pytest.raises(AssertionError, match=rf"node {seq.cache.nodes[0]} loses\b"):
        drop_page(scheduler.memory, seq.cache.nodes[0])
    assert scheduler.audit() == []


def test_pages_of_leaves_without_a_page_are_not_evicted_twice() -> None:
    scheduler = new(pages=1 + 8)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    memory = scheduler.memory
    drop_page(memory, nodes_of(memory, SYSTEM)[2])
    occupy(memory, 7)
    assert (memory.usage.cached, memory.usage.free) == (1, 0)
    assert memory.tree is not None
    assert memory.tree.num_nodes == 1, "the leaf without a page went first and gave none"
    vacate(memory)
    assert scheduler.audit() == []


def test_scored_prompt_is_computed_whole_and_cached() -> None:
    scheduler = new(step=64, chunk=64)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    scored = with_prompt(2, *SYSTEM, 1, prompt_logprobs=0)
    queried = scheduler.memory.num_queried_tokens
    run(scheduler, scored, first_step=40)
    assert (scored.cache.num_cached_tokens, scheduler.memory.num_queried_tokens) == (0, queried)
    assert scheduler.memory.usage.cached == 3, "its pages were there already"
    assert scheduler.audit() == []


def test_pages_computed_twice_are_kept_once() -> None:
    scheduler = new(step=64, chunk=64)
    first, second = with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2, max_tokens=9, prompt_logprobs=0)
    added(scheduler, first, second)
    plan = launched(scheduler, 1)
    assert second.pages[0][:3] == first.pages[0][:3]
    assert scheduler.memory.usage.in_use == 3 + 1 + 1, "its own pages are free, though the step in flight writes them"
    commit(scheduler, plan, [20, 21])
    assert scheduler.memory.usage.in_use == 5
    rows = {row.seq_id: row for row in launched(scheduler, 2).rows}
    assert (rows[2].new_pages, rows[2].first_page) == (tuple(second.pages[0]), 0), "the device hears of the change"
    assert rows[1].new_pages == ()
    assert scheduler.audit() == []


def overtaken(step: int) -> tuple[Scheduler, Sequence, Sequence]:
    """One prompt whose first chunk is in flight, and an urgent one that computes the same from its beginning."""
    scheduler = new(step=step, chunk=step, policy="priority")
    behind, ahead = with_prompt(1, *SYSTEM, 1), with_prompt(2, *SYSTEM, 2, prompt_logprobs=0, priority=5)
    added(scheduler, behind)
    launched(scheduler, 1)
    added(scheduler, ahead)
    return scheduler, behind, ahead


def test_prompt_skips_pages_computed_by_another_meanwhile() -> None:
    scheduler, behind, ahead = overtaken(4)
    for step in (2, 3, 4):
        (row,) = launched(scheduler, step).rows
        assert row.seq_id == ahead.id
    assert behind.num_scheduled_tokens == 8, "as far as the other had come when the last step was planned"
    rows = {row.seq_id: row for row in launched(scheduler, 5).rows}
    assert (rows[1].start, rows[1].length, rows[1].skipped) == (12, 1, 8)
    assert array("i", rows[1].tokens).tolist() == [*SYSTEM[4:], 1]
    assert (rows[1].new_pages, rows[1].first_page) == (tuple(behind.pages[0][1:]), 1)
    assert behind.pages[0][:3] == ahead.pages[0][:3]
    assert behind.cache.num_cached_tokens == 8
    assert [start for _, start in scheduler.take_updates().started if start.request_id == 1] == [
        Started(1, 0),
        Started(1, 8),
    ], "a start is reported at the admission, and again when more was found before the first token"
    assert scheduler.audit() == []


def test_half_written_page_may_serve_another_in_the_next_step() -> None:
    scheduler, behind, ahead = overtaken(2)
    ((mine,),) = behind.pages
    plans = [launched(scheduler, step) for step in (2, 3)]
    scheduler.plan_step(4)
    assert behind.num_scheduled_tokens == 4
    assert behind.pages[0][0] == ahead.pages[0][0] != mine
    assert scheduler.memory.pages.owned()[ahead.id] == [mine], "steps run in order, so the writes of step 1 come first"
    assert scheduler.audit() == []
    for plan in plans:
        commit(scheduler, plan, [-1] * len(plan.rows))
    assert scheduler.audit() == []


def test_pool_without_a_cache_keeps_no_pages() -> None:
    scheduler = new(cache=False)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    seq = with_prompt(2, *SYSTEM, 1)
    added(scheduler, seq)
    assert (seq.num_scheduled_tokens, scheduler.memory.usage.cached, scheduler.memory.num_queried_tokens) == (0, 0, 0)
    run(scheduler, first_step=20)
    assert scheduler.memory.pages.used == 0


def test_cached_tokens_uploaded_in_a_step_are_bounded() -> None:
    """A step uploads a bounded number of tokens, so of many long cached prompts some begin a step later."""
    scheduler = new(step=64, chunk=64, pages=60)
    scheduler.limits = scheduler.planner.limits = type(scheduler.limits)(64, 64, 50, max_uploads=30)
    run(scheduler, sequence(1, 13))
    added(scheduler, *[sequence(number, 13) for number in range(2, 6)])
    assert [len(launched(scheduler, step).rows) for step in (50, 51)] == [2, 4]


def test_waiting_ignores_producers_of_lower_priority() -> None:
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


def test_declined_sequence_is_retried_when_pages_come_back() -> None:
    scheduler = new(pages=1 + 5)
    first, second = with_prompt(1, *SYSTEM, 1), with_prompt(2, *range(60, 75))
    added(scheduler, first, second)
    plan = launched(scheduler, 1)
    assert scheduler.admit_waiting() == []
    commit(scheduler, plan, [20])
    assert scheduler.admit_waiting() == []
    scheduler.abort(b"c", 1)
    assert scheduler.admit_waiting() == [second]


def test_declined_sequence_is_retried_when_pages_become_shared() -> None:
    """A less urgent one computes the whole prompt, so no sequence waits for it, and there is no room to compute it
    twice."""
    scheduler = new(pages=1 + 6, chunk=0, step=32)
    low, urgent = with_prompt(1, *SYSTEM, 1, max_tokens=5), with_prompt(2, *SYSTEM, 2)
    low.priority = -1
    added(scheduler, low, urgent)
    assert list(scheduler.running) == [1]
    plan = launched(scheduler, 1)
    assert scheduler.admit_waiting() == [urgent]
    assert urgent.cache.num_cached_tokens == 12
    commit(scheduler, plan, [20])


def test_producer_of_lower_priority_is_replaced_so_that_others_share() -> None:
    scheduler = new(rows=8, step=8, pages=80)
    low, *herd = [with_prompt(number, *SYSTEM, number) for number in range(1, 7)]
    low.priority = -1
    added(scheduler, low)
    launched(scheduler, 1)
    added(scheduler, *herd)
    assert list(scheduler.running) == [1, 2], "one of them computes it for all"


def test_matched_path_ends_where_the_cache_has_evicted() -> None:
    scheduler = new(pages=1 + 8)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    memory, seq = scheduler.memory, with_prompt(2, *SYSTEM, 2)
    seq.tokens.extend(range(300, 300 + 12))
    occupy(memory, 4)
    scheduler.add(seq)
    assert scheduler.memory.admit(seq, 99, 5) is False, "it looks, and is declined"
    assert len(seq.cache.matched) == 3
    occupy(memory, 2)
    assert memory.usage.num_evicted == 1
    vacate(memory)
    assert scheduler.admit_waiting() == [seq]
    assert (len(seq.cache.nodes), seq.num_scheduled_tokens) == (2, 8)
    assert scheduler.audit() == []


def test_matched_path_ends_where_a_node_has_lost_its_page() -> None:
    """Not only its last node: pages of the others may go as well while the nodes stay."""
    scheduler = new(rows=1)
    run(scheduler, with_prompt(1, *SYSTEM, 1))
    seq = with_prompt(2, *SYSTEM, 2)
    scheduler.add(seq)
    assert scheduler.memory.admit(seq, 99, 99) is False
    assert len(seq.cache.matched) == 3
    drop_page(scheduler.memory, seq.cache.matched[0])
    assert scheduler.admit_waiting() == [seq]
    assert seq.cache.nodes == []
    assert scheduler.audit() == []
