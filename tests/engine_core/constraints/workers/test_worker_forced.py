"""What a worker keeps of runs of forced tokens, against matchers of the test's own."""

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    ACCEPTED,
    CLOSE,
    ENDS_FORCED,
    FAILED,
    FORCES,
    FORCES_MORE,
    MASK,
    MAX_FORCED,
    OPEN,
    STOPPED,
    TAKE,
    Channel,
    create_memory,
    map_memory,
)
from tandem.engine_core.constraints.workers.mask_memory import MappedMasks, MaskMemory
from tandem.engine_core.constraints.workers.worker import Worker
from tandem.engine_core.integers import ceil_div
from tests.engine_core.constraints.conftest import VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.slow_matcher import SlowMatcher
from tests.support.effort import EFFORT
from tests.support.grammar_walks import WALKED, mask_of, next_token

WORDS, SLOT = ceil_div(VOCAB, 32), 5


@dataclass
class Sides:
    """A worker and the engine's side of its channel."""

    engine: Channel
    worker: Worker

    def do(self, *operations: tuple[int, int, int]) -> None:
        """Let the worker do a batch."""
        self.engine.post(array("i", [part for operation in operations for part in operation]))
        self.worker.do_next()

    def check(self, matcher: LLMatcher, accepted: bool, is_told: bool = True) -> None:
        """Compare the slot's matcher and what is said of it with a matcher after the same tokens.

        is_told: whether the last token was one after which the state is written.
        """
        flags, known, forced = self.engine.flags[SLOT], self.engine.forced(SLOT), matcher.compute_ff_tokens()
        own = self.worker._matchers[SLOT]
        assert (own.is_stopped(), own.is_error()) == (matcher.is_stopped(), matcher.is_error())
        assert own.compute_ff_tokens() == forced
        assert matcher.is_error() or mask_of(own, WORDS) == mask_of(matcher, WORDS)
        if not is_told:
            assert (flags, known) == (ACCEPTED, [])
            return
        assert known == forced[: len(known)] and bool(known) == bool(forced)
        after = matcher.deep_copy()
        ends = 0 < len(forced) == len(known) and after.consume_tokens(forced) and after.is_stopped()
        more = FORCES_MORE if len(forced) > len(known) else 0
        expected = ACCEPTED * accepted | STOPPED * matcher.is_stopped() | FAILED * matcher.is_error()
        assert flags == expected | FORCES * bool(forced) | ENDS_FORCED * ends | more


@pytest.fixture
def sides() -> Iterator[Sides]:
    memory, memory_fd, wake_fd = MaskMemory(), create_memory(), os.eventfd(0)
    memory.allocate(1, WORDS)
    engine, theirs = (Channel(map_memory(memory_fd), wake_fd) for _ in range(2))
    os.close(memory_fd)
    yield Sides(engine, Worker(theirs, MappedMasks(memory.fds, 4 * WORDS), FakeClock()))
    engine.close()


@pytest.mark.parametrize("name", list(WALKED))
def test_a_walk_leaves_a_matcher_where_one_alone_is(sides: Sides, grammars: Grammars, name: str) -> None:
    """Looking ahead over what is forced, which is rolled back, changes neither its mask nor what it accepts."""
    first = grammars.compile(WALKED[name]).first
    sides.worker.grammars[1] = first
    for seed in range(6 * EFFORT):
        random, alone = Random(f"{name} {seed}"), first.deep_copy()
        sides.do((OPEN, SLOT, 1))
        sides.check(alone, accepted=False)
        for _ in range(60):
            forced, batch, is_told, accepted = alone.compute_ff_tokens(), [], True, True
            if forced and random.random() < 0.3:
                run = forced[: random.randrange(1, len(forced) + 1)]
                is_told = random.random() < 0.7
                batch = [(TAKE, SLOT, token) for token in run[:-1]]
                batch.append((ACCEPT if is_told else TAKE, SLOT, run[-1]))
                assert alone.consume_tokens(run)
            else:
                token = next_token(random, alone, VOCAB)
                if forced and random.random() < 0.1:  # a shorter token than is forced
                    text = grammars.prepare().decode_bytes(forced[:1])
                    token = grammars.prepare().tokenize_str(text[:1].decode())[0]
                accepted = alone.consume_token(token)
                batch = [(ACCEPT, SLOT, token)]
            sides.do(*batch)
            sides.check(alone, accepted, is_told)
            if alone.is_error():
                break
        sides.do((CLOSE, SLOT, 0))


def test_nothing_is_reported_after_a_token_that_is_only_taken(sides: Sides, grammars: Grammars) -> None:
    """Tokens forced before it are not reported as forced any more; the next token's state is computed."""
    first = grammars.compile(WALKED["one text"]).first
    sides.worker.grammars[1], run = first, first.compute_ff_tokens()
    sides.do((OPEN, SLOT, 1), (TAKE, SLOT, run[0]))
    assert (sides.engine.flags[SLOT], sides.engine.forced(SLOT)) == (ACCEPTED, [])
    sides.do((ACCEPT, SLOT, run[1]))
    assert sides.engine.forced(SLOT) == run[2:]
    assert sides.engine.flags[SLOT] == ACCEPTED | FORCES | ENDS_FORCED


class CountingMatcher(SlowMatcher):
    """Matcher that counts its computations of what is forced, of which it has said all at its start."""

    def __init__(self, forced: Sequence[int]) -> None:
        super().__init__()
        self.forced = list(forced)
        self.num_computed = 0
        self.undo: list[int] = []

    def deep_copy(self) -> "CountingMatcher":
        return self

    def compute_ff_tokens(self) -> list[int]:
        self.num_computed += 1
        return list(self.forced)

    def consume_token(self, token: int) -> bool:
        self.undo.append(self.forced.pop(0) if self.forced else -1)
        return True

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def rollback(self, count: int) -> bool:
        for _ in range(count):
            self.forced.insert(0, self.undo.pop())
        return True


def test_a_run_is_computed_once(sides: Sides) -> None:
    """Until its last token they are known; after it another computation finds further ones."""
    run = list(range(100, 100 + MAX_FORCED + 20))
    matcher = CountingMatcher(run)
    sides.worker.grammars[1] = cast("LLMatcher", matcher)
    sides.do((OPEN, SLOT, 1))
    computed = []
    for token in run:
        sides.do((ACCEPT, SLOT, token))
        computed.append(matcher.num_computed)
        assert sides.engine.forced(SLOT) == [each for each in run if token < each][: len(sides.engine.forced(SLOT))]
        assert bool(sides.engine.flags[SLOT] & FORCES) == (token != run[-1])
    assert computed == [1] * (MAX_FORCED - 1) + [2] * 20 + [3]


class StuckMatcher(CountingMatcher):
    """Matcher that cannot go back."""

    def rollback(self, count: int) -> bool:
        return False


class LimitedMatcher(CountingMatcher):
    """Matcher that comes to a limit within any token it is given by itself."""

    def consume_token(self, token: int) -> bool:
        return False

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        return True

    def rollback(self, count: int) -> bool:
        return True


def test_a_matcher_that_cannot_be_rolled_back_has_failed(sides: Sides) -> None:
    """It is somewhere else then, writes no mask, and one of the engine's takes over."""
    sides.worker.grammars[1] = cast("LLMatcher", StuckMatcher([7, 8]))
    sides.do((OPEN, SLOT, 1))
    assert sides.engine.flags[SLOT] & FAILED
    sides.do((MASK, SLOT, 0))
    assert not sides.engine.has_mask[SLOT] and sides.engine.num_refused == 1


def test_a_rejected_token_that_was_forced_is_not_dropped(sides: Sides) -> None:
    """The state is that of a matcher that has accepted nothing."""
    sides.worker.grammars[1] = cast("LLMatcher", LimitedMatcher([7, 8]))
    sides.do((OPEN, SLOT, 1), (ACCEPT, SLOT, 7))
    assert not sides.engine.flags[SLOT] & ACCEPTED
