"""Tokens that many matchers accept together, in this process and on workers."""

from collections.abc import Sequence
from random import Random
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import GrammarConstraint, Grammars
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar
from tandem.engine_core.contracts import NO_TOKEN, ArrivingTokens, InternedList, MaskedRows
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.inline_link import InlineLink
from tests.support.effort import EFFORT
from tests.support.grammar_walks import WALKED, next_token

# No token of the default model has a "q" before one of "a" to "d", so the tokens of "xyq" are forced.
REGEX = LLMatcher.grammar_from_regex("[a-d]{1,9}(xyq[a-d]{1,9}|end)")


@pytest.fixture(
    params=[None, 0, 1, 2], ids=["without a pool", "here", "half of them on a worker", "all on two workers"]
)
def advancer(request: pytest.FixtureRequest, grammars: Grammars) -> BatchAdvancer:
    masks = MaskMemory()
    masks.allocate(1, 50)
    if request.param is None:
        return BatchAdvancer()
    return BatchAdvancer(WorkerPool(request.param, lambda: InlineLink(grammars, masks)), masks)


def constraints(grammars: Grammars, rows: int, advancer: BatchAdvancer | None = None) -> list[GrammarConstraint]:
    """Return constraints, the first half of them in this process if there are not two workers."""
    here, elsewhere = grammars.compile(REGEX), grammars.compile(REGEX)
    workers = None if advancer is None else advancer.workers
    for _ in range(workers.count if workers else 0):
        remote = workers.compile(REGEX, elsewhere.links) if workers else None
        assert isinstance(remote, RemoteGrammar)
        elsewhere.add_remote(remote)
    num_here = 0 if workers and workers.count == 2 else rows // 2
    held = [here.constraint(ignore_ends=False) for _ in range(num_here)]
    return held + [elsewhere.constraint(ignore_ends=False) for _ in range(rows - num_here)]


def numbered(held: Sequence[GrammarConstraint]) -> list[tuple[int, GrammarConstraint]]:
    """Give the constraints rows from 100 on."""
    return [(100 + index, each) for index, each in enumerate(held)]


def state(constraint: GrammarConstraint) -> tuple[bool, bool, list[int]]:
    return bool(constraint.problem), constraint.is_complete, constraint.fast_forward_tokens()


def expect(advancer: BatchAdvancer, masks: MaskedRows, tokens: Sequence[int], random: Random) -> None:
    """Let the tokens arrive at random indices of the advancer's memory, among others."""
    memory = advancer.memory.arrays[0][0] if advancer.memory.arrays else np.zeros(50, dtype=np.int32)
    memory[:] = [random.randrange(VOCAB) for _ in memory]
    indices: Sequence[int] = range(len(tokens))
    if random.random() < 0.3:
        indices = random.sample(range(len(memory)), len(tokens))
    memory[indices] = tokens
    has_remote = any(cast("GrammarConstraint", each).remote is not None for _, each in masks)
    assert advancer.accept_on_arrival(masks, ArrivingTokens(memory.data, indices)) == has_remote


@pytest.mark.parametrize("is_expected", [False, True])
def test_outcome_is_that_of_accepting_each_token_by_itself(
    grammars: Grammars, advancer: BatchAdvancer, is_expected: bool
) -> None:
    """Among them tokens that the grammar rejects, ends where it may not end yet, ids that do not exist, and none."""
    random, num_rejected, num_advanced = Random(5), 0, 0
    letters = [grammars.prepare().tokenize_str(letter)[0] for letter in "abcdxyqen"]
    for _ in range(2 * EFFORT):
        ahead, alone = constraints(grammars, 40, advancer), constraints(grammars, 40)
        masks = InternedList(numbered(ahead))
        for step in range(12):
            choices = [*letters * 8, 300, *ENDS, VOCAB, VOCAB + 7, NO_TOKEN] if step else letters[:4]
            tokens = [random.choice(choices) for _ in ahead]
            if is_expected:
                expect(advancer, masks, tokens, random)
            advancer.start_accept(masks, tokens, 1)
            advanced = advancer.finish_accept()
            for (row, each), token in zip(masks, tokens, strict=True):
                reference = alone[row - 100]
                if token == NO_TOKEN:
                    assert row not in advanced
                    continue
                accepted = reference.accept(token)
                nothing_left = accepted and state(reference) == (False, False, [])
                assert (row in advanced) == nothing_left
                assert nothing_left or each.accept(token) == accepted
                assert state(each) == state(reference)
                num_rejected += bool(each.problem)
                num_advanced += nothing_left
    assert num_rejected > 50 and num_advanced > 50


@pytest.mark.parametrize("least", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["letters", "few ends", "a choice and its end", "record", "array", "long record"])
def test_rows_on_which_few_tokens_are_forced_are_advanced(
    grammars: Grammars, advancer: BatchAdvancer, name: str, least: int
) -> None:
    """Fewer than `least`; all have accepted their token, and the state of the others is theirs."""
    random, compiled, num_forced = Random(f"{name} {least}"), grammars.compile(WALKED[name]), 0
    for number in range(8):
        if number == 4 and advancer.workers is not None and advancer.workers.count:
            compiled.add_remote(advancer.workers.compile(WALKED[name], []))
        held = [compiled.constraint(ignore_ends=False) for _ in range(4)]
        alone = [compiled.first.deep_copy() for _ in held]
        for _ in range(10):
            tokens = [next_token(random, each, VOCAB, strays=0.01) for each in alone]
            advancer.start_accept(numbered(held), tokens, least)
            advanced = advancer.finish_accept()
            for (row, each), token, reference in zip(numbered(held), tokens, alone, strict=True):
                accepted = reference.consume_token(token)
                goes_on = accepted and not reference.is_stopped()
                forced = reference.compute_ff_tokens()
                assert (row in advanced) == (goes_on and len(forced) < least)
                assert row in advanced or each.accept(token) == (accepted and not reference.is_error())
                known = each._matcher.compute_ff_tokens() if row in advanced else each.fast_forward_tokens()
                assert known == forced[: len(known)] and bool(known) == bool(forced)
                num_forced += row in advanced and bool(forced)
    assert num_forced or least == 1 or name not in ("record", "a choice and its end"), (
        "no row that is advanced forces a token"
    )


def test_token_given_ahead_is_not_given_again(grammars: Grammars, advancer: BatchAdvancer) -> None:
    held = constraints(grammars, 8, advancer)
    a, x, y, q, d = (grammars.prepare().tokenize_str(letter)[0] for letter in "axyqd")
    advancer.start_accept(numbered(held), [a] * 8, 1)
    assert advancer.finish_accept() == set(range(100, 108))
    advancer.start_accept(numbered(held), [x] * 8, 1)
    assert advancer.finish_accept() == set(), "two letters are forced"
    for each in (held[0], held[-1]):
        with pytest.raises(AssertionError, match="ahead"):
            each.accept(d)
    for each in held[1:-1]:
        assert each.accept(x) and each.fast_forward_tokens() == [y, q]
        assert all(each.accept(token) for token in [y, q, *[a] * 9])


def test_overdrawn_constraints_accept_nothing(grammars: Grammars, advancer: BatchAdvancer) -> None:
    held = constraints(grammars, 4)[:2]
    (a,) = grammars.prepare().tokenize_str("a")
    for each in held:
        each.overdrawn = "too slow"
    advancer.start_accept(numbered(held), [a, a], 1)
    assert advancer.finish_accept() == set()
    assert not any(each.accept(a) for each in held)


def test_constraint_whose_sequence_ends_meanwhile(grammars: Grammars, advancer: BatchAdvancer) -> None:
    """Commands are applied between the two calls: they may end sequences."""
    held = constraints(grammars, 4, advancer)
    (a,) = grammars.prepare().tokenize_str("a")
    advancer.start_accept(numbered(held), [a] * 4, 1)
    del held
    assert advancer.finish_accept() == {100, 101, 102, 103}


def test_constraint_that_is_moved_to_a_worker_meanwhile(grammars: Grammars) -> None:
    masks = MaskMemory()
    masks.allocate(1, 1)
    pool = WorkerPool(1, lambda: InlineLink(grammars, masks))
    advancer, compiled = BatchAdvancer(pool), grammars.compile(REGEX)
    held = [compiled.constraint(ignore_ends=False) for _ in range(3)]
    a, x, y = (grammars.prepare().tokenize_str(letter)[0] for letter in "axy")
    advancer.start_accept(numbered(held), [a] * 3, 1)
    compiled.add_remote(pool.compile(REGEX, []))
    assert all(each.remote for each in held)
    assert advancer.finish_accept() == set()
    assert all(each.accept(a) and each.accept(x) for each in held)
    assert held[0].fast_forward_tokens()[:1] == [y]


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_failed_row_of_a_lost_worker(grammars: Grammars, is_expected: bool) -> None:
    """The other rows of that worker go on in this process; the failed one is left as it is."""
    memory = MaskMemory()
    tokens = memory.allocate(1, 2)[0]
    link = InlineLink(grammars, memory)
    pool = WorkerPool(1, lambda: link)
    advancer, held = BatchAdvancer(pool, memory), constraints(grammars, 4, BatchAdvancer(pool))[2:]
    (a,) = grammars.prepare().tokenize_str("a")
    masks, tokens[:] = numbered(held), (a, NO_TOKEN)
    if is_expected:
        assert advancer.accept_on_arrival(masks, ArrivingTokens(tokens.data, [0, 1]))
    advancer.start_accept(masks, tokens.tolist(), 1)
    link.lose("is lost")
    assert advancer.finish_accept() == set()
    assert held[0].remote is None and held[0].accept(a)
    assert held[1].accept(a) and held[1].remote is None, "no token was given to it before"


def test_no_tokens(grammars: Grammars, advancer: BatchAdvancer) -> None:
    held = constraints(grammars, 4, advancer)
    before = [state(each) for each in held]
    advancer.start_accept([], [], 1)
    assert advancer.finish_accept() == set()
    assert [state(each) for each in held] == before


def test_forced_tokens_are_not_those_of_an_earlier_step(grammars: Grammars, advancer: BatchAdvancer) -> None:
    """A step finds enough of them, which its commit leaves; the next step finds too few and advances the row."""
    held = constraints(grammars, 8, advancer)
    a, x, y, q = (grammars.prepare().tokenize_str(letter)[0] for letter in "axyq")
    for token, least in ((a, 1), (x, 1)):
        advancer.start_accept(numbered(held), [token] * 8, least)
        advanced = advancer.finish_accept()
    assert advanced == set() and all(each.accept(x) for each in held)
    # Commands that came meanwhile let `min_jump` grow: nothing is jumped over.
    assert all(each.fast_forward_tokens() == [y, q] for each in held)
    advancer.start_accept(numbered(held), [y] * 8, 3)
    assert advancer.finish_accept() == set(range(100, 108))
    assert [each.fast_forward_tokens() for each in held] == [[q]] * 8
    assert all(each.accept_forced(each.fast_forward_tokens()) for each in held)
