"""The workers of an engine: which gets a grammar, and what happens without them."""

from collections.abc import Iterator
from threading import Event, Thread

import numpy as np
import pytest

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.workers.channel import MASK
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import RESTART_SECONDS, WorkerPool
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar, RemoteMatcher
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.fakes.inline_link import InlineLink
from tests.support.grammar_walks import WALKED
from tests.support.refusals import numbers_in
from tests.support.remote_steps import begin_mask

TEXT, OTHER = WALKED["letters"], WALKED["words"]


class SilentLink(InlineLink):
    """Link to a worker that does not answer."""

    def compile(self, text: str) -> int | None:
        self.compiled.append(text)
        self._give_up("does not answer")
        return None


class Links:
    """Starts links, each in turn of what is given: a link, or an error."""

    def __init__(self, *links: WorkerLink | OSError) -> None:
        self.links = list(links)
        self.num_started = 0

    def start(self) -> WorkerLink:
        link = self.links[self.num_started]
        self.num_started += 1
        if isinstance(link, OSError):
            raise link
        return link


def opened(remote: RemoteGrammar | None, grammars: Grammars, text: str, count: int) -> list[RemoteMatcher]:
    assert remote is not None
    compiled = grammars.compile(text)
    return [RemoteMatcher(remote, compiled) for _ in range(count)]


def test_workers_start_with_the_first_grammar(grammars: Grammars, memory: MaskMemory) -> None:
    links = Links(*(InlineLink(grammars, memory) for _ in range(3)))
    pool = WorkerPool(3, links.start)
    pool.post_awaited()
    pool.wait()
    assert links.num_started == 0
    pool.compile(TEXT, [])
    pool.compile(OTHER, [])
    assert links.num_started == 3
    pool.close()


def test_the_worker_with_the_fewest_matchers_gets_a_grammar(grammars: Grammars, memory: MaskMemory) -> None:
    links = [InlineLink(grammars, memory) for _ in range(3)]
    pool = WorkerPool(3, Links(*links).start)
    held = []
    for expected, count in ((0, 5), (1, 3), (2, 4), (1, 3), (2, 0)):
        remote = pool.compile(TEXT, [])
        assert remote is not None and remote.link is links[expected]
        held.append(opened(remote, grammars, TEXT, count))
    assert [link.num_open for link in links] == [5, 6, 4]
    held[0].clear()
    remote = pool.compile(TEXT, [])
    assert remote is not None and remote.link is links[0]
    pool.close()


def test_a_worker_that_has_the_grammar_does_not_get_it_again(grammars: Grammars, memory: MaskMemory) -> None:
    pool = WorkerPool(2, Links(*(InlineLink(grammars, memory) for _ in range(2))).start)
    taken: list[WorkerLink] = []
    for _ in range(2):
        remote = pool.compile(TEXT, taken)
        assert remote is not None and remote.link not in taken
        taken.append(remote.link)
    assert pool.compile(TEXT, taken) is None
    assert pool.compile(OTHER, []) is not None
    pool.close()


def test_a_worker_that_is_lost_or_silent_is_passed_over(grammars: Grammars, memory: MaskMemory) -> None:
    silent, lost, good = SilentLink(grammars, memory), InlineLink(grammars, memory), InlineLink(grammars, memory)
    pool = WorkerPool(3, Links(silent, lost, good).start)
    lost.close()
    for text in (TEXT, OTHER):
        remote = pool.compile(text, [])
        assert remote is not None and remote.link is good
    assert silent.compiled == [TEXT], "it is asked once"
    assert pool.compile(TEXT, [good]) is None
    pool.close()


def test_a_grammar_that_a_worker_cannot_compile_is_its_own_fault(grammars: Grammars, memory: MaskMemory) -> None:
    class RefusingLink(InlineLink):
        def compile(self, text: str) -> int | None:
            raise RequestError(ErrorCode.INVALID_GRAMMAR, "the grammar does not compile: too large")

    other = InlineLink(grammars, memory)
    pool = WorkerPool(2, Links(RefusingLink(grammars, memory), other).start)
    with pytest.raises(RequestError, match="large"):
        pool.compile(TEXT, [])
    assert other.compiled == []
    pool.close()


@pytest.mark.parametrize("num_good", [0, 1])
def test_an_engine_goes_on_with_the_workers_that_start(
    grammars: Grammars, memory: MaskMemory, caplog: pytest.LogCaptureFixture, num_good: int
) -> None:
    """It tries again later, with one at a time."""
    clock, good = FakeClock(), [InlineLink(grammars, memory) for _ in range(3)]
    links = Links(*good[:num_good], OSError("no more processes"), *good[num_good:])
    pool = WorkerPool(3, links.start, clock=clock)
    for text in (TEXT, OTHER):
        assert (pool.compile(text, []) is not None) == pool.has_free([]) == bool(num_good)
    assert links.num_started == num_good + 1, "it is tried once"
    (message,) = [message for message in caplog.messages if "no more processes" in message]
    assert numbers_in(message) == [num_good, 3]
    assert not pool.take_refused()
    for number in range(num_good, 3):
        clock.advance(RESTART_SECONDS)
        assert pool.has_free(good[:number])
        remote = pool.compile(TEXT, good[:number])
        assert remote is not None and remote.link is good[number]
    clock.advance(RESTART_SECONDS)
    assert not pool.has_free(good) and pool.compile(TEXT, good) is None
    pool.close()


def test_masks_are_missing_where_one_was_refused_or_a_worker_is_lost(grammars: Grammars, memory: MaskMemory) -> None:
    links = [InlineLink(grammars, memory) for _ in range(2)]
    pool = WorkerPool(2, Links(*links).start)
    held = [opened(pool.compile(TEXT, links[:number]), grammars, TEXT, 1)[0] for number in range(2)]
    for refused in (True, False, True):
        links[1].worker._slow = {1} if refused else set()
        for matcher in held:
            begin_mask(matcher, int(refused))
        pool.post_awaited()
        pool.wait()
        assert pool.take_refused() == refused
    assert [matcher.end_mask() for matcher in held] == [True, False]
    links[0].end()
    begin_mask(held[0], 2)
    pool.post_awaited()
    pool.wait()
    assert links[0].is_lost and pool.take_refused()
    assert not held[0].end_mask()
    pool.close()


def test_a_closed_pool_starts_nothing(grammars: Grammars, memory: MaskMemory) -> None:
    links = Links(InlineLink(grammars, memory))
    pool = WorkerPool(1, links.start)
    pool.close()
    assert pool.compile(TEXT, []) is None and links.num_started == 0


def test_closing_waits_for_workers_that_start(grammars: Grammars, memory: MaskMemory) -> None:
    """They would be left behind otherwise."""
    is_starting, may_start = Event(), Event()
    link = InlineLink(grammars, memory)

    def start() -> WorkerLink:
        is_starting.set()
        may_start.wait()
        return link

    pool = WorkerPool(1, start)
    answers: list[RemoteGrammar | None] = []
    compiling = Thread(target=lambda: answers.append(pool.compile(TEXT, [])))
    compiling.start()
    is_starting.wait()
    closing = Thread(target=pool.close)
    closing.start()
    may_start.set()
    compiling.join()
    closing.join()
    assert link.is_lost and len(answers) == 1
    answers.clear()
    pool.close()


def test_grammars_are_shared_out_before_any_has_a_matcher(grammars: Grammars, memory: MaskMemory) -> None:
    links = [InlineLink(grammars, memory) for _ in range(2)]
    pool = WorkerPool(2, Links(*links).start)
    kept = [pool.compile(text, []) for text in (TEXT, OTHER)]
    assert [link.compiled for link in links] == [[TEXT], [OTHER]]
    assert all(kept)


class TestReplacements:
    """Workers that are started for lost ones."""

    @pytest.fixture(autouse=True)
    def site(self, grammars: Grammars, memory: MaskMemory) -> Iterator[None]:
        self.grammars, self.stats, self.clock = grammars, EngineStats(), FakeClock()
        self.made = [InlineLink(grammars, memory) for _ in range(5)]
        self.links = Links(*self.made)
        self.pool = WorkerPool(2, self.links.start, self.stats, self.clock)
        yield
        self.pool.close()

    def counted(self) -> tuple[int, int]:
        self.pool.update_stats()
        return self.stats.grammar_workers, self.stats.grammar_workers_lost

    def test_one_follows_a_lost_one_with_the_next_grammar(self) -> None:
        assert self.counted() == (0, 0) and self.pool.has_free([])
        held = opened(self.pool.compile(TEXT, []), self.grammars, TEXT, 2)
        assert self.counted() == (2, 0)
        self.made[1].lose("is gone")
        assert (self.stats.grammar_workers, self.stats.grammar_workers_lost) == (1, 1)
        self.clock.advance(RESTART_SECONDS)
        assert self.pool.has_free([self.made[0]])
        remote = self.pool.compile(TEXT, [self.made[0]])
        assert remote is not None and remote.link is self.made[2]
        assert self.counted() == (2, 1) and not self.pool.has_free([self.made[0], self.made[2]])
        held += opened(remote, self.grammars, TEXT, 2)
        ids = np.array([matcher.id for matcher in held], dtype=np.int32)
        batches = self.pool.enqueue(MASK, ids, np.arange(4, dtype=np.int32))
        parts = [(batch.link, sorted(batch.indices.tolist())) for batch in batches]
        assert parts == [(self.made[0], [0, 1]), (self.made[2], [2, 3])]

    def test_lost_ones_stay_until_their_matchers_are_gone(self, caplog: pytest.LogCaptureFixture) -> None:
        (each,) = opened(self.pool.compile(TEXT, []), self.grammars, TEXT, 1)
        self.made[0].end()
        self.made[0].lose("ended")
        self.clock.advance(RESTART_SECONDS)
        caplog.set_level("INFO")
        assert self.pool.compile(TEXT, [self.made[1]]) is not None
        assert any(numbers_in(line)[:1] == [2] for line in caplog.messages), "three are known"
        (batch,) = self.pool.enqueue(MASK, np.array([each.id], dtype=np.int32), np.zeros(1, dtype=np.int32))
        assert batch.link is self.made[0] and self.pool.take_refused() and not each.end_mask()
        self.made[1].lose("ended")
        self.clock.advance(RESTART_SECONDS)
        assert self.pool.compile(OTHER, []) is not None
        assert self.pool._links == self.made[2:4] and not self.pool.take_refused()

    def test_no_worker_replaces_an_earlier_one(self) -> None:
        """Matchers that a lost worker had are not taken for those of the one after it."""
        old = opened(self.pool.compile(TEXT, []), self.grammars, TEXT, 1)
        self.made[0].lose("is gone")
        self.clock.advance(RESTART_SECONDS)
        new = opened(self.pool.compile(TEXT, [self.made[1]]), self.grammars, TEXT, 1)
        assert new[0].link is self.made[2] and new[0].id != old[0].id

    def test_all_that_were_lost_are_not_started_at_once(self) -> None:
        self.pool.compile(TEXT, [])
        for link in self.made[:2]:
            link.lose("is gone")
        assert self.pool.compile(TEXT, []) is None and not self.pool.has_free([])
        for number in range(3, 5):
            self.clock.advance(RESTART_SECONDS)
            assert self.pool.compile(TEXT, []) is not None and self.links.num_started == number

    def test_one_that_does_not_answer_is_given_up_once_it_follows_nothing(self) -> None:
        held = opened(self.pool.compile(TEXT, []), self.grammars, TEXT, 1)
        for link in self.made[:2]:
            link._give_up("is gone")
        self.pool.give_up_silent()
        assert not self.pool.has_free([]) and self.counted() == (1, 1)
        held.clear()
        self.made[0].post_and_wait()
        self.clock.advance(RESTART_SECONDS)
        self.pool.give_up_silent()
        assert self.pool.has_free([]) and self.counted() == (0, 2)
        assert all(link.process.code is not None for link in self.made[:2]), "no process is left"
        remote = self.pool.compile(TEXT, [])
        assert remote is not None and remote.link is self.made[2] and self.counted() == (1, 2)

    def test_one_that_cannot_run_is_not_started_again_and_again(self) -> None:
        self.pool.compile(TEXT, [])
        for number in range(2, 5):
            self.made[number - 1].lose("is gone")
            for _ in range(3):
                assert not self.pool.has_free([self.made[0]])
                assert self.pool.compile(TEXT, [self.made[0]]) is None
            assert self.links.num_started == number
            self.clock.advance(RESTART_SECONDS)
            assert self.pool.has_free([self.made[0]])
            assert self.pool.compile(TEXT, [self.made[0]]) is not None
        assert self.counted() == (2, 3)

    def test_a_system_that_refuses_is_asked_again_later(self, caplog: pytest.LogCaptureFixture) -> None:
        self.links.links[2] = OSError("no more processes")
        self.pool.compile(TEXT, [])
        self.made[1].lose("is gone")
        self.clock.advance(RESTART_SECONDS)
        for _ in range(3):
            assert self.pool.compile(TEXT, [self.made[0]]) is None
        assert self.links.num_started == 3 and caplog.text.count("no more processes") == 1
        self.clock.advance(RESTART_SECONDS)
        assert self.pool.compile(TEXT, [self.made[0]]) is not None
        assert self.counted() == (2, 1)

    def test_a_closed_pool_starts_none(self) -> None:
        self.pool.compile(TEXT, [])
        self.made[1].lose("is gone")
        self.pool.close()
        self.clock.advance(RESTART_SECONDS)
        assert self.pool.compile(OTHER, []) is None and self.links.num_started == 2
