"""Operations of a worker, against matchers of the test's own."""

import ctypes
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from multiprocessing import Pipe
from random import Random
from threading import Thread
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_budget import FREE_SECONDS
from tandem.engine_core.constraints.matchers import Matchers
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    ACCEPTED,
    CLOSE,
    DROP,
    ENDS_FORCED,
    FAILED,
    FORCES_MORE,
    MASK,
    MAX_FORCED,
    MAX_SLOTS,
    OPEN,
    STOPPED,
    Channel,
    create_memory,
    map_memory,
)
from tandem.engine_core.constraints.workers.mask_memory import MappedMasks, MaskMemory
from tandem.engine_core.constraints.workers.worker import BATCH_SECONDS, SLOW_SECONDS, Worker, compile_requests
from tandem.engine_core.errors import RequestError
from tandem.engine_core.integers import ceil_div
from tandem.protocol.errors import ErrorCode
from tests.engine_core.constraints.conftest import VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.slow_matcher import SlowMatcher
from tests.support.effort import EFFORT
from tests.support.grammar_walks import first_matchers, mask_of, next_token

WORDS, ROWS = ceil_div(VOCAB, 32), 64


@dataclass
class Sides:
    """A worker, the engine's side of its channel, and masks that both see."""

    engine: Channel
    worker: Worker
    masks: NDArray[np.int32]
    clock: FakeClock

    def do(self, *operations: tuple[int, int, int]) -> None:
        """Let the worker do a batch."""
        self.engine.post(array("i", [part for operation in operations for part in operation]))
        self.worker.do_next()
        assert self.engine.is_done


@pytest.fixture
def sides() -> Iterator[Sides]:
    yield (built := build_sides())
    built.engine.close()


def build_sides() -> Sides:
    memory, memory_fd, wake_fd, clock = MaskMemory(), create_memory(), os.eventfd(0), FakeClock()
    masks = memory.allocate(ROWS, WORDS)
    engine, theirs = (Channel(map_memory(memory_fd), wake_fd) for _ in range(2))
    os.close(memory_fd)
    return Sides(engine, Worker(theirs, MappedMasks(memory.fds, 4 * WORDS), clock, clock), masks, clock)


@pytest.fixture(scope="module")
def firsts(grammars: Grammars) -> list[LLMatcher]:
    return first_matchers(grammars)


def check_state(engine: Channel, slot: int, matcher: LLMatcher, accepted: bool) -> None:
    """Compare what is known of a slot with a matcher after the same tokens."""
    forced, after = matcher.compute_ff_tokens(), matcher.deep_copy()
    flags = engine.flags[slot]
    assert bool(flags & ACCEPTED) == accepted
    assert bool(flags & STOPPED) == matcher.is_stopped()
    assert bool(flags & FAILED) == matcher.is_error()
    known = engine.forced(slot)
    assert known == forced[: len(known)] and bool(known) == bool(forced) and len(known) <= MAX_FORCED
    assert bool(flags & FORCES_MORE) == (len(forced) > len(known))
    ends = 0 < len(forced) == len(known) and after.consume_tokens(forced) and after.is_stopped()
    assert bool(flags & ENDS_FORCED) == ends


@settings(max_examples=12 * EFFORT)
@given(seed=st.integers(0, 2**32))
def test_each_operation_does_what_it_does_to_a_matcher(firsts: list[LLMatcher], seed: int) -> None:
    sides, random = build_sides(), Random(seed)
    for number, first in enumerate(firsts):
        sides.worker.grammars[number] = first
    slots = random.sample(range(MAX_SLOTS), 5)
    own: dict[int, LLMatcher] = {}
    num_refused = num_flagged = 0
    for _ in range(30):
        batch: list[tuple[int, int, int]] = []
        touched: dict[int, bool] = {}
        masks: dict[int, list[int]] = {}
        is_good: dict[int, bool] = {}
        for _ in range(random.randrange(1, 12)):
            slot, index = random.choice(slots), len(batch)
            if slot not in own or random.random() < 0.04:
                if slot in own and random.random() < 0.8:
                    batch.append((CLOSE, slot, 0))
                number = random.randrange(len(firsts))
                own[slot], touched[slot] = firsts[number].deep_copy(), False
                batch.append((OPEN, slot, number))
            elif random.random() < 0.3:
                batch.append((MASK, slot, index))
                is_good[slot] = not own[slot].is_error()
                if is_good[slot]:
                    masks[index] = mask_of(own[slot], WORDS)
                num_refused += own[slot].is_error()
            else:
                token = next_token(random, own[slot], VOCAB)
                touched[slot] = own[slot].consume_token(token)
                num_flagged += not touched[slot] or own[slot].is_stopped() or bool(own[slot].compute_ff_tokens())
                batch.append((ACCEPT, slot, token))
        sides.do(*batch)
        for slot, accepted in touched.items():
            check_state(sides.engine, slot, own[slot], accepted)
        for index, mask in masks.items():
            assert sides.masks[index].tolist() == mask
        for slot, expected in is_good.items():
            assert sides.engine.has_mask[slot] == expected, "a matcher of the engine's looks at a failure again"
    assert (sides.engine.num_refused, sides.engine.num_flagged) == (num_refused, num_flagged)
    sides.engine.close()


def test_a_dropped_grammar_is_followed_by_those_that_have_it(sides: Sides, firsts: list[LLMatcher]) -> None:
    sides.worker.grammars[7] = firsts[0]
    sides.do((OPEN, 1, 7), (DROP, 7, 0))
    assert not sides.worker.grammars
    sides.do((MASK, 1, 3))
    assert sides.masks[3].tolist() == mask_of(firsts[0], WORDS)


def slow(sides: Sides, number: int, seconds: float) -> SlowMatcher:
    """Give the worker a grammar of which each mask takes this long."""
    matcher = SlowMatcher((sides.clock, seconds))
    sides.worker.grammars[number] = cast("LLMatcher", matcher)
    return matcher


def test_masks_of_a_slow_grammar_are_refused(sides: Sides) -> None:
    """From the first on, in all its slots; those of others are written."""
    slow(sides, 1, 1.01 * SLOW_SECONDS)
    slow(sides, 2, 0.0)
    sides.do((OPEN, 1, 1), (OPEN, 2, 1), (OPEN, 3, 2), (MASK, 1, 1), (MASK, 2, 2), (MASK, 3, 3))
    assert [sides.engine.has_mask[slot] for slot in (1, 2, 3)] == [False, False, True]
    assert sides.engine.num_refused == 2
    now = sides.clock()
    sides.do((MASK, 1, 1), (MASK, 2, 2), (MASK, 3, 3))
    assert sides.engine.num_refused == 4 and sides.clock() == now, "a slow grammar costs no more time"
    sides.do((DROP, 1, 0), (CLOSE, 1, 0), (CLOSE, 2, 0))
    slow(sides, 4, 0.0)
    sides.do((OPEN, 1, 4), (MASK, 1, 1))
    assert sides.engine.has_mask[1] and sides.engine.num_refused == 4, "the slot is not to blame"


def test_a_mask_that_is_not_slow_is_written(sides: Sides) -> None:
    slow(sides, 1, 0.99 * SLOW_SECONDS)
    sides.do((OPEN, 1, 1), (MASK, 1, 0))
    assert sides.engine.has_mask[1] and (sides.masks[0] == -1).all()


def test_time_of_other_processes_makes_no_grammar_slow(sides: Sides) -> None:
    """It counts for the batch alone, whose other masks the engine needs soon."""
    cpu = sides.worker.cpu_clock = FakeClock()
    sides.worker.grammars[1] = cast("LLMatcher", SlowMatcher((sides.clock, 10 * SLOW_SECONDS), (cpu, 0.0001)))
    sides.do((OPEN, 1, 1), (OPEN, 2, 1))
    for _ in range(3):
        sides.do((MASK, 1, 1), (MASK, 2, 2))
        assert [sides.engine.has_mask[slot] for slot in (1, 2)] == [True, False]
    sides.worker.grammars[3] = cast("LLMatcher", SlowMatcher((sides.clock, 10 * SLOW_SECONDS), (cpu, SLOW_SECONDS)))
    sides.do((OPEN, 3, 3))
    for expected in (True, False):
        sides.do((MASK, 3, 3))
        assert sides.engine.has_mask[3] == expected


def test_costly_masks_of_a_matcher_add_up(sides: Sides) -> None:
    """Cheap ones pay for them, and those of other matchers of the grammar do not count."""
    first = slow(sides, 1, 0.4 * SLOW_SECONDS)
    masks = (MASK, 1, 1), (MASK, 2, 2)
    sides.do((OPEN, 1, 1), (OPEN, 2, 1), *masks)
    sides.do(*masks)
    assert sides.engine.num_refused == 0
    for copy in first.copies:
        copy.costs = ((sides.clock, 0.0),)
    sides.do(*masks * ceil(0.4 * SLOW_SECONDS / FREE_SECONDS))
    for copy in first.copies:
        copy.costs = ((sides.clock, 0.4 * SLOW_SECONDS),)
    sides.do(*masks)
    assert sides.engine.num_refused == 0
    sides.do(*masks)
    assert sides.engine.num_refused == 2


def test_masks_after_the_time_of_a_batch_are_refused(sides: Sides) -> None:
    """The next batch has its own time."""
    slow(sides, 1, 0.3 * BATCH_SECONDS)
    slots = range(6)
    for refused in (2, 4):
        sides.do(*((OPEN, slot, 1) for slot in slots))
        sides.do(*((MASK, slot, slot) for slot in slots))
        assert [sides.engine.has_mask[slot] for slot in slots] == [True] * 4 + [False] * 2
        assert sides.engine.num_refused == refused


def test_other_operations_have_no_time_limit(sides: Sides) -> None:
    slow(sides, 1, 0.3 * BATCH_SECONDS)
    slow(sides, 2, 0.0)
    sides.do(*((OPEN, slot, 1) for slot in range(5)), (OPEN, 5, 2))
    sides.do(*((MASK, slot, slot) for slot in range(6)), (ACCEPT, 5, 1), (OPEN, 7, 1), (CLOSE, 0, 0))
    assert sides.engine.flags[5] == ACCEPTED
    sides.do((MASK, 7, 0), (MASK, 5, 0))
    assert sides.engine.has_mask[7] and sides.engine.has_mask[5]


class CountingMatcher(SlowMatcher):
    """Matcher whose copies count their masks in one list, and may do something after each."""

    def __init__(self, made: list[int]) -> None:
        super().__init__()
        self.made = made

    def deep_copy(self) -> "CountingMatcher":
        return CountingMatcher(self.made)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        ctypes.memset(address, 0xFF, size)
        self.made.append(address)


def test_engine_learns_of_tokens_before_the_masks_are_written(sides: Sides) -> None:
    known: list[bool] = []

    class Noting(list[int]):
        def append(self, address: int) -> None:
            super().append(address)
            known.append(sides.engine.has_accepted and sides.engine.flags[2] == ACCEPTED and not sides.engine.is_done)

    sides.worker.grammars[1] = cast("LLMatcher", CountingMatcher(Noting()))
    sides.do((OPEN, 1, 1), (OPEN, 2, 1), (ACCEPT, 1, 7), (ACCEPT, 2, 7), (MASK, 1, 0), (MASK, 2, 1))
    assert known == [True, True]
    sides.do((ACCEPT, 1, 7))
    assert sides.engine.has_accepted, "a batch without masks"


class OddMatchers:
    """Matchers that fail in a way of their own for each text."""

    def matcher(self, text: str) -> LLMatcher:
        if text == "panic":
            raise BaseException("unreachable code")
        if text == "memory":
            raise MemoryError
        if text == "refused":
            raise RequestError(ErrorCode.INVALID_REQUEST, "there is no tokenizer")
        return cast("LLMatcher", FailedMatcher() if text == "failed" else SlowMatcher())


class FailedMatcher(SlowMatcher):
    """Matcher that has failed without words."""

    def is_error(self) -> bool:
        return True


class EngineGoneError(BaseException):
    """Raised instead of ending the process."""


def test_each_grammar_gets_its_answer_until_the_engine_is_gone(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a compilation raises, the thread goes on: it is what ends the process with its engine."""

    def leave(code: int) -> None:
        raise EngineGoneError(code)

    monkeypatch.setattr(os, "_exit", leave)
    engine, theirs = Pipe()
    texts = ["panic", "good", "memory", "refused", "failed", "good"]
    for number, text in enumerate(texts, start=1):
        engine.send_bytes(msgspec.msgpack.encode((number, text)))
    answers: list[str] = []

    def take() -> None:
        answers.extend(engine.recv_bytes().decode() for _ in texts)
        engine.close()

    thread = Thread(target=take)
    thread.start()
    with pytest.raises(EngineGoneError):
        compile_requests(theirs, cast("Matchers", OddMatchers()), sides.worker)
    thread.join()
    theirs.close()
    assert [bool(answer) for answer in answers] == [True, False, True, True, True, False]
    assert "unreachable code" in answers[0] and "no tokenizer" in answers[3]
    assert list(sides.worker.grammars) == [2, 6]
