"""Sequences whose last prompt tokens are verified: their rows, and the KV and checkpoints that they leave."""

from array import array

import pytest

from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.codec import unpack_ids
from tandem.protocol.params import SamplingParams
from tests.support.kv_pool import evict_unused
from tests.support.scheduling import added, commit, launched, new, run, submitted

SYSTEM = tuple(range(100, 112))
"""Three pages of four."""


def verified(number: int, prompt: tuple[int, ...], *tokens: int, session: str = "") -> Sequence:
    fields = {"prompt_logprobs": 0, "num_verified": len(tokens), "logits": True, "session": session}
    return submitted(number, (*prompt, *tokens), SamplingParams(1), **fields)


def plain(number: int, *prompt: int, max_tokens: int = 1, session: str = "") -> Sequence:
    return submitted(number, prompt, SamplingParams(max_tokens), session=session)


def num_cached(scheduler: Scheduler, *tokens: int) -> int:
    tree = scheduler.memory.tree
    assert tree is not None
    return len(tree.match(b"", array("i", tokens), len(tokens) // 4))


@pytest.mark.parametrize("cached", [False, True])
def test_row_scores_the_verified_tokens_only(cached: bool) -> None:
    scheduler = new()
    if cached:
        run(scheduler, plain(1, *SYSTEM, 1, 2, 3, 4, 5))
    added(scheduler, verified(2, (*SYSTEM, 1), 2, 3, 4))
    (row,) = launched(scheduler, 90).rows
    assert (row.start, row.end, row.samples) == (12 if cached else 0, 16, True)
    assert unpack_ids(row.prompt_logprob_ids) == [2, 3, 4]
    assert (row.num_unscored, row.num_scored) == (0 if cached else 12, 3)
    assert (row.logits, row.num_logits) == (True, 4)


def test_chunks_before_the_verified_tokens_return_nothing() -> None:
    scheduler = new(step=5, chunk=5)
    added(scheduler, verified(1, SYSTEM, 7, 8, 9, 10))
    rows = []
    for step in range(1, 5):
        plan = launched(scheduler, step)
        rows += plan.rows
        commit(scheduler, plan, [20])
    assert [(row.start, row.num_unscored, row.num_scored, row.num_logits) for row in rows] == [
        (0, 0, 0, 0),
        (5, 0, 0, 0),
        (10, 1, 4, 4),
        (15, 0, 0, 1),
    ]
    assert scheduler.audit() == []


def test_kv_of_verified_tokens_is_neither_published_nor_awaited() -> None:
    scheduler = new(step=64, chunk=64)
    first, same = verified(1, SYSTEM[:6], *SYSTEM[6:], *range(20, 30)), plain(2, *SYSTEM, *range(20, 30))
    added(scheduler, first, same)
    plan = launched(scheduler, 1)
    scheduler.admit_waiting()
    assert (num_cached(scheduler, *SYSTEM), same.num_scheduled_tokens) == (1, 4)
    commit(scheduler, plan, [20])
    assert first.outcome is not None
    assert num_cached(scheduler, *SYSTEM) == 1
    assert scheduler.audit() == []


def test_verified_tokens_in_the_cache_are_computed_and_stay_there() -> None:
    scheduler = new()
    run(scheduler, plain(1, *SYSTEM, 1, 2, 3, 4, 5))
    assert num_cached(scheduler, *SYSTEM, 1, 2, 3, 4) == 4
    seq = verified(2, SYSTEM[:8], *SYSTEM[8:], 1, 2, 3, 4)
    added(scheduler, seq)
    assert seq.num_scheduled_tokens == 4, "the last token before them is computed as well"
    plan = launched(scheduler, 50)
    assert seq.cache.nodes == scheduler.memory.tree.match(b"", seq.tokens, 2)  # type: ignore[union-attr]
    commit(scheduler, plan, [20])
    assert num_cached(scheduler, *SYSTEM, 1, 2, 3, 4) == 4
    assert scheduler.memory.usage.in_use == 0
    assert scheduler.audit() == []


@pytest.mark.parametrize("windows", [(None,), (None, 9, 5), (6,)])
def test_session_keeps_the_prompt(windows: tuple[int | None, ...]) -> None:
    scheduler = new(step=8, chunk=8, pages=100, windows=windows)
    run(scheduler, verified(1, (*SYSTEM, 1), *range(20, 60), session="talk"))
    [session] = scheduler.memory.sessions.known
    assert len(session.nodes) == 3
    evict_unused(scheduler.memory)
    turn = plain(2, *SYSTEM, 1, 2, session="talk")
    added(scheduler, turn)
    assert turn.num_scheduled_tokens == 12, "the pages of the windows before the verified tokens were held"
    assert scheduler.audit() == []


def test_aborted_verification_leaves_the_pages_of_its_prompt() -> None:
    scheduler = new(step=64, chunk=64)
    seq = verified(1, SYSTEM, *range(20, 40))
    added(scheduler, seq)
    plan = launched(scheduler, 1)
    scheduler.abort(b"c", 1)
    assert seq.num_scheduled_tokens == 12
    assert scheduler.audit() == []
    commit(scheduler, plan, [20])
    assert scheduler.memory.usage.in_use == 0
    assert num_cached(scheduler, *SYSTEM, *range(20, 40)) == 3


def test_no_checkpoint_covers_verified_tokens() -> None:
    scheduler = new(step=64, chunk=64, pages=100, state_slots=4, grid=16)
    run(scheduler, verified(1, tuple(range(100, 120)), *range(20, 60)))
    states = scheduler.memory.states
    assert states is not None
    saved = [save for save in states._saves.values() if save.position > 16]
    assert not saved
    assert scheduler.audit() == []


def test_long_prompt_leaves_a_checkpoint_before_its_verified_tokens() -> None:
    scheduler = new(step=64, chunk=64, pages=100, state_slots=4, grid=16)
    prompt = tuple(range(100, 190))
    run(scheduler, verified(1, prompt, *range(20, 60)))
    again = verified(2, prompt, *range(30, 70))
    added(scheduler, again)
    assert again.num_scheduled_tokens == 64
    assert scheduler.audit() == []
