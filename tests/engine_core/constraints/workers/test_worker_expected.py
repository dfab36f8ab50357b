"""Tokens that a worker accepts as the device writes them."""

import os
from array import array
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.workers.channel import (
    ACCEPTED,
    EXPECT,
    MASK,
    OPEN,
    Channel,
    create_memory,
    map_memory,
)
from tandem.engine_core.constraints.workers.mask_memory import MappedMasks, MaskMemory
from tandem.engine_core.constraints.workers.worker import BATCH_SECONDS, Worker
from tandem.engine_core.contracts import NO_TOKEN, PENDING_TOKEN
from tandem.engine_core.integers import ceil_div
from tests.engine_core.constraints.conftest import VOCAB
from tests.fakes.clock import FakeClock
from tests.support.grammar_walks import allowed_tokens, first_matchers, mask_of

WORDS, ROWS = ceil_div(VOCAB, 32), 8
WAIT_SECONDS = 0.05


class Site:
    """A worker on a thread, the engine's side of its channel, masks, and tokens that arrive."""

    def __init__(self, memory: MaskMemory, memory_fd: int, clock: FakeClock) -> None:
        wake_fd = os.eventfd(0)
        self.masks: NDArray[np.int32] = memory.arrays[0]
        self.tokens: NDArray[np.int32] = memory.arrays[1][0]
        self.first_index = memory.first_index(memory.arrays[1])
        self.engine = Channel(map_memory(memory_fd), wake_fd)
        self.clock = clock
        self.worker = Worker(Channel(map_memory(memory_fd), wake_fd), MappedMasks(memory.fds, 4 * WORDS), clock, clock)
        self.doing = Thread()

    def begin(self, *operations: tuple[int, int, int]) -> None:
        self.engine.post(array("i", [part for operation in operations for part in operation]))
        self.doing = Thread(target=self.worker.do_next)
        self.doing.start()

    def do(self, *operations: tuple[int, int, int]) -> None:
        self.begin(*operations)
        self.doing.join()
        assert self.engine.is_done

    def still_waits(self) -> bool:
        self.doing.join(WAIT_SECONDS)
        return self.doing.is_alive() and not self.engine.has_accepted


@pytest.fixture
def site() -> Iterator[Site]:
    memory, memory_fd = MaskMemory(), create_memory()
    memory.allocate(ROWS, WORDS)
    memory.allocate(1, ROWS)[:] = PENDING_TOKEN
    yield (built := Site(memory, memory_fd, FakeClock()))
    os.close(memory_fd)
    built.engine.close()


@pytest.fixture
def first(grammars: Grammars) -> LLMatcher:
    return first_matchers(grammars)[0]


def test_what_follows_an_expected_token_waits_for_it(site: Site, first: LLMatcher) -> None:
    token, alone = allowed_tokens(first)[0], first.deep_copy()
    site.worker.grammars[0] = first
    site.do((OPEN, 3, 0), (OPEN, 4, 0))
    site.begin((EXPECT, 3, site.first_index + 5), (EXPECT, 4, site.first_index + 6), (MASK, 3, 0), (MASK, 4, 1))
    site.tokens[:5], site.tokens[7:] = 9, 9
    assert site.still_waits()
    site.tokens[5] = token
    assert site.still_waits()
    site.tokens[6] = token
    site.doing.join()
    assert alone.consume_token(token)
    for slot, index in ((3, 0), (4, 1)):
        assert site.engine.flags[slot] & ACCEPTED and site.engine.has_mask[slot]
        assert site.masks[index].tolist() == mask_of(alone, WORDS)


def test_no_token_leaves_a_matcher_as_it_is(site: Site, first: LLMatcher) -> None:
    site.worker.grammars[0] = first
    site.do((OPEN, 0, 0))
    flags, site.tokens[2] = site.engine.flags[0], NO_TOKEN
    site.do((EXPECT, 0, site.first_index + 2), (MASK, 0, 0))
    assert site.engine.flags[0] == flags and site.masks[0].tolist() == mask_of(first.deep_copy(), WORDS)


def test_the_time_of_a_batch_begins_with_its_last_token(site: Site, first: LLMatcher) -> None:
    """A step that takes long costs no masks."""
    site.worker.grammars[0] = first
    site.do((OPEN, 0, 0))
    site.begin((EXPECT, 0, site.first_index), (MASK, 0, 0))
    assert site.still_waits()
    site.clock.advance(2 * BATCH_SECONDS)
    site.tokens[0] = allowed_tokens(first)[0]
    site.doing.join()
    assert site.engine.has_mask[0] and site.engine.num_refused == 0
