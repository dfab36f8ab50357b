"""Matchers on a worker, which do what those of this process do, also when the worker is lost."""

import gc
from array import array
from dataclasses import dataclass
from random import Random
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import CompiledGrammar, Grammars
from tandem.engine_core.constraints.local_matcher import LocalMatcher
from tandem.engine_core.constraints.workers.channel import (
    CLOSE,
    DROP,
    MAX_FORCED,
    MAX_OPERATIONS,
    MAX_SLOTS,
    OPEN,
)
from tandem.engine_core.constraints.workers.link import ANSWER_SECONDS
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar, RemoteMatcher
from tandem.engine_core.constraints.workers.worker import BATCH_SECONDS, SLOW_SECONDS
from tandem.engine_core.integers import ceil_div
from tests.engine_core.constraints.conftest import VOCAB
from tests.fakes.inline_link import InlineLink
from tests.support.effort import EFFORT
from tests.support.grammar_walks import WALKED, mask_of, next_token
from tests.support.remote_steps import begin_accept, begin_mask

WORDS = ceil_div(VOCAB, 32)
POINTS = ("open", "idle", "begin_accept", "forced", "begin_mask", "")
"""Moments at which a worker is lost: before its next batch, and before what is named is sent. Never for the last."""


@pytest.fixture(scope="module")
def compiled(grammars: Grammars) -> list[CompiledGrammar]:
    return [grammars.compile(text) for text in WALKED.values()]


class StepClock:
    """Clock that moves with each look at it."""

    def __init__(self, step: float) -> None:
        self.now = 100.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@dataclass
class Follower:
    """A link, masks of its worker, and grammars on it."""

    link: InlineLink
    masks: NDArray[np.int32]
    first_index: int

    @classmethod
    def build(cls, grammars: Grammars) -> "Follower":
        memory = MaskMemory()
        memory.allocate(3, WORDS)
        masks = memory.allocate(2, WORDS)
        return cls(InlineLink(grammars, memory), masks, memory.first_index(masks))

    def grammar(self, first: LLMatcher) -> RemoteGrammar:
        """Return a grammar that the worker shares with this process."""
        self.link.compiled.append("")
        self.link.worker.grammars[len(self.link.compiled)] = first
        return RemoteGrammar(self.link, len(self.link.compiled))

    def mask(self, matcher: RemoteMatcher, lose: bool = False) -> list[int]:
        """Return a matcher's mask, from wherever it comes."""
        if matcher.local is None:
            begin_mask(matcher, self.first_index + 1)
        if lose:
            self.link.end()
        self.link.post_and_wait()
        if not matcher.end_mask():
            assert matcher.local is not None
            matcher.local.write_mask(self.masks[1].ctypes.data, 4 * WORDS)
        return self.masks[1].tolist()


def check_equal(remote: RemoteMatcher, alone: LocalMatcher) -> None:
    """Compare what both know; of many forced tokens a worker reports the first, except at the start."""
    forced, known = alone.compute_ff_tokens(), remote.compute_ff_tokens()
    assert known == forced[: len(known)] and bool(known) == bool(forced)
    assert len(known) <= MAX_FORCED or remote.local is not None or known == forced
    assert remote.is_stopped() == alone.is_stopped()
    assert bool(remote.get_error()) == bool(alone.get_error()), "its words depend on what was computed before"


def follow(random: Random, compiled: CompiledGrammar, follower: Follower, point: str) -> RemoteMatcher:
    """Walk with a matcher on the worker and a local one in parallel; return it.

    point: of POINTS; the worker is lost there at some step of the walk.
    """
    link = follower.link
    remote, alone = RemoteMatcher(follower.grammar(compiled.first), compiled), LocalMatcher(compiled)
    loss = random.randrange(12) if point != "open" else 0
    if point == "open":
        link.end()
    for step in range(60):
        may_lose = step >= loss and not link.is_lost
        if may_lose and point == "idle":
            link.end()
        if random.random() < 0.5:
            mask = np.zeros(WORDS, dtype=np.int32)
            alone.write_mask(mask.ctypes.data, mask.nbytes)
            assert follower.mask(remote, may_lose and point == "begin_mask") == mask.tolist()
        if random.random() < 0.5:
            check_equal(remote, alone)
        token = next_token(random, alone._matcher, VOCAB)
        if random.random() < 0.4 and remote.local is None:
            begin_accept(remote, token)
            if may_lose and point == "begin_accept":
                link.end()
            link.post_and_wait()
            accepted, forced = remote.end_accept()
            assert accepted == alone.consume_token(token)
            if forced is None:
                assert remote.local is not None or not accepted or alone.is_stopped()
            else:
                assert accepted and not alone.is_stopped()
                expected = alone.compute_ff_tokens()
                assert forced == expected[: len(forced)] and bool(forced) == bool(expected)
        else:
            is_forced = remote.compute_ff_tokens()[:1] == [token]
            assert remote.consume_token(token) == alone.consume_token(token)
            if is_forced and may_lose and point == "forced":
                link.end()
    check_equal(remote, alone)
    assert point or not link.is_lost
    return remote


@pytest.mark.parametrize("point", POINTS)
@settings(max_examples=4 * EFFORT)
@given(seed=st.integers(0, 2**32))
def test_a_walk_is_that_of_a_matcher_of_this_process(
    point: str, compiled: list[CompiledGrammar], grammars: Grammars, seed: int
) -> None:
    """For each grammar, among its tokens some that it rejects and some that do not exist."""
    for number in range(len(compiled)):
        follower = Follower.build(grammars)
        remote = follow(Random(seed + number), compiled[number], follower, point)
        del remote
        assert follower.link.num_open == 0
        follower.link.close()


def test_forced_tokens_beyond_the_first_are_reported_after_them(
    compiled: list[CompiledGrammar], grammars: Grammars
) -> None:
    follower, whole = Follower.build(grammars), compiled[list(WALKED).index("one long text")]
    remote, alone = RemoteMatcher(follower.grammar(whole.first), whole), LocalMatcher(whole)
    token = grammars.prepare().tokenize_str("a")[0]
    assert remote.consume_token(token) and alone.consume_token(token)
    expected, told = alone.compute_ff_tokens(), []
    while forced := remote.compute_ff_tokens():
        assert all(remote.consume_token(token) for token in forced)
        told.append(forced)
    assert [token for part in told for token in part] == expected
    assert [len(part) for part in told] == [MAX_FORCED, len(expected) - MAX_FORCED] and not remote.is_stopped()
    assert remote.consume_token(grammars.prepare().tokenize_str("c")[0])
    while forced := remote.compute_ff_tokens():
        assert all(remote.consume_token(token) for token in forced)
    assert remote.is_stopped(), "the text after it ends with a forced token"


@pytest.mark.parametrize("step", [1.01 * SLOW_SECONDS, 1.01 * BATCH_SECONDS], ids=["slow mask", "long batch"])
def test_a_refused_mask_is_made_here_from_then_on(
    compiled: list[CompiledGrammar], grammars: Grammars, step: float
) -> None:
    follower, whole = Follower.build(grammars), compiled[0]
    grammar = follower.grammar(whole.first)
    remote, alone = RemoteMatcher(grammar, whole), LocalMatcher(whole)
    token = grammars.prepare().tokenize_str("b")[0]
    for _ in range(3):
        assert remote.consume_token(token) and alone.consume_token(token)
    worker, clock = follower.link.worker, StepClock(step)
    worker.clock = worker.cpu_clock = clock
    assert follower.mask(remote) == mask_of(alone._matcher, WORDS)
    assert remote.local is not None and not follower.link.is_lost
    assert grammar.is_spent, "no further matcher is given to it"
    assert follower.link.num_open == 0
    check_equal(remote, alone)
    assert remote.consume_token(token) and alone.consume_token(token)
    check_equal(remote, alone)


def test_a_worker_that_does_not_answer_is_lost(compiled: list[CompiledGrammar], grammars: Grammars) -> None:
    follower, whole = Follower.build(grammars), compiled[0]
    remote, alone = RemoteMatcher(follower.grammar(whole.first), whole), LocalMatcher(whole)
    token = grammars.prepare().tokenize_str("b")[0]
    assert remote.consume_token(token) and alone.consume_token(token)
    follower.link.inline.do_next = lambda: None
    follower.link._clock = StepClock(0.4 * ANSWER_SECONDS)
    assert follower.mask(remote) == mask_of(alone._matcher, WORDS)
    assert follower.link.is_lost and follower.link.process.code == -9


def record_slots(link: InlineLink) -> list[set[int]]:
    """Check each batch that is posted: no slot is opened twice or closed unopened; return what is open."""
    opened: set[int] = set()
    post = link.inline.post

    def checked(operations: "array[int]") -> None:
        for index in range(0, len(operations), 3):
            kind, slot, _ = operations[index : index + 3]
            if kind == OPEN:
                assert slot not in opened
                opened.add(slot)
            elif kind == CLOSE:
                opened.remove(slot)
            elif kind != DROP:
                assert slot in opened
        post(operations)

    link.inline.post = checked  # type: ignore[method-assign]
    return [opened]


def test_slots_come_back(compiled: list[CompiledGrammar], grammars: Grammars) -> None:
    follower, random = Follower.build(grammars), Random(2)
    (opened,) = record_slots(follower.link)
    held: list[RemoteMatcher] = []
    remote = [follower.grammar(each.first) for each in compiled]
    for _ in range(300):
        number = random.randrange(len(compiled))
        held.append(RemoteMatcher(remote[number], compiled[number]))
        while random.random() < 0.47 and held:
            del held[random.randrange(len(held))]
        assert follower.link.num_open == len(held)
        if random.random() < 0.3:
            follower.link.post_and_wait()
            assert len(opened) == len(held) == len(follower.link.worker._matchers)
    held.clear()
    follower.link.post_and_wait()
    assert not opened and follower.link.num_open == 0
    del remote
    follower.link.post_and_wait()
    assert not follower.link.worker.grammars


def test_all_slots_can_be_taken_again_and_again(compiled: list[CompiledGrammar], grammars: Grammars) -> None:
    follower = Follower.build(grammars)
    grammar = follower.grammar(compiled[0].first)
    for _ in range(2):
        held = [RemoteMatcher(grammar, compiled[0]) for _ in range(MAX_SLOTS)]
        assert not follower.link.has_room
        held.pop()
        assert follower.link.has_room
        held.append(RemoteMatcher(grammar, compiled[0]))
        assert not follower.link.has_room
        del held[:]
        assert follower.link.has_room


def test_matchers_may_be_dropped_on_any_thread(compiled: list[CompiledGrammar], grammars: Grammars) -> None:
    """The garbage collector ends cycles on the thread that it happens to run on."""
    follower = Follower.build(grammars)
    (opened,) = record_slots(follower.link)
    grammar = follower.grammar(compiled[0].first)
    given: list[list[RemoteMatcher]] = []
    is_over = False

    def drop() -> None:
        while given or not is_over:
            if given:
                given.pop().clear()

    thread = Thread(target=drop)
    thread.start()
    for _ in range(150):
        given.append([RemoteMatcher(grammar, compiled[0]) for _ in range(4)])
        follower.link.post_and_wait()
    is_over = True
    thread.join()
    follower.link.post_and_wait()
    assert not opened and follower.link.num_open == 0


def test_a_collected_cycle_gives_its_slot_back(compiled: list[CompiledGrammar], grammars: Grammars) -> None:
    follower = Follower.build(grammars)
    cycle: list[object] = [RemoteMatcher(follower.grammar(compiled[0].first), compiled[0])]
    cycle.append(cycle)
    del cycle
    gc.collect()
    follower.link.post_and_wait()
    assert follower.link.num_open == 0 and not follower.link.worker.grammars


def test_more_operations_than_a_batch_holds_are_done(compiled: list[CompiledGrammar], grammars: Grammars) -> None:
    """A mask that was refused in the first batch is not forgotten over the last."""
    follower, whole = Follower.build(grammars), compiled[0]
    slow, quick = (RemoteMatcher(follower.grammar(whole.first), whole) for _ in range(2))
    follower.link.post_and_wait()
    follower.link.worker._slow.add(1)
    begin_mask(slow, follower.first_index)
    for number in range(2 * MAX_OPERATIONS):
        begin_mask(quick, follower.first_index + number % 2)
    begin_mask(quick, follower.first_index + 1)
    follower.link.post_and_wait()
    assert follower.link.take_refused()
    assert not slow.end_mask() and quick.end_mask()
    assert follower.masks[1].tolist() == mask_of(whole.first, WORDS)
    begin_mask(quick, follower.first_index)
    follower.link.post_and_wait()
    assert not follower.link.take_refused()
