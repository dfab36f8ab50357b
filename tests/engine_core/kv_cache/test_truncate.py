"""Truncated sequences: what they keep, what others keep, and that they can be continued."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.pages import CACHE
from tandem.engine_core.page_counts import page_columns
from tandem.engine_core.plan import PADDING_PAGE
from tandem.engine_core.scheduler.step_rows import build_row
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.effort import machine
from tests.support.kv_pool import end_sessions, evict_unused, kv_memory, occupy, vacate
from tests.support.scheduling import submitted

Windows = tuple[int | None, ...]
LONGEST, CHUNK = 96, 12


class Pool:
    """A pool of KV as a device holds it: what was written to each position of each page, and the mapped pages."""

    def __init__(self, pages: int, page_size: int, cache: bool, windows: Windows) -> None:
        self.memory = kv_memory(pages, page_size, cache, windows=windows)
        self.windows, self.page_size = windows, page_size
        self.rings = [columns.ring for columns in page_columns(windows, page_size, LONGEST, CHUNK)]
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}
        """Tokens up to a position, by page and offset: KV depends on all of them."""
        self.mapped: dict[tuple[int, int, int], int] = {}
        """Page by sequence, group and column."""

    def admit(self, seq: Sequence) -> bool:
        seq.row = seq.id
        return self.memory.admit(seq, CHUNK, 0)

    def compute(self, seq: Sequence, count: int) -> int:
        """Compute up to `count` positions of a sequence; return how many there were pages for."""
        memory, start = self.memory, seq.num_scheduled_tokens
        end = memory.grow(seq, min(start + count, len(seq.tokens)))
        if end <= start:
            return 0
        row = build_row(seq, end - start, memory)
        per_group = len(row.new_pages) // len(self.windows)
        for group in range(len(self.windows)):
            for offset, page in enumerate(row.new_pages[group * per_group : (group + 1) * per_group]):
                self.mapped[seq.id, group, self._column(group, row.first_page + offset)] = page
        for group, window in enumerate(self.windows):
            for position in range(start, end):
                page, offset = self._slot(seq, group, position)
                assert page in memory.pages.owned()[seq.id], f"{seq} writes page {page}, which is not its own"
                self.written[page, offset] = tuple(seq.tokens[: position + 1])
            for position in range(0 if window is None else max(0, start + 1 - window), end):
                assert self.written[self._slot(seq, group, position)] == tuple(seq.tokens[: position + 1])
        seq.num_scheduled_tokens = end
        memory.on_launch(seq, row)
        seq.on_launch()
        return end - start

    def _column(self, group: int, index: int) -> int:
        ring = self.rings[group]
        return index % ring if ring else index

    def _slot(self, seq: Sequence, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.page_size)
        page = self.mapped[seq.id, group, self._column(group, index)]
        assert page != PADDING_PAGE, f"{seq} uses no page at {position} of group {group}"
        return page, offset


def prompted(number: int, *prompt: int, session: str = "") -> Sequence:
    return submitted(number, prompt, SamplingParams(1), session=session)


def computed(pool: Pool, seq: Sequence) -> Sequence:
    assert pool.admit(seq)
    while seq.num_scheduled_tokens < len(seq.tokens):
        assert pool.compute(seq, CHUNK)
    return seq


def nodes_with(memory: KVManager, seq: Sequence, pages: int) -> list[int]:
    assert memory.tree is not None
    return memory.tree.match(b"", seq.tokens, pages)


def test_truncation_frees_own_pages_behind_the_length() -> None:
    pool = Pool(30, 4, cache=False, windows=(None, None))
    seq = computed(pool, prompted(1, *range(10, 31)))
    assert pool.memory.usage.in_use == 2 * 6
    pool.memory.truncate(seq, 9)
    assert seq.num_scheduled_tokens == 9
    assert pool.memory.usage.in_use == 2 * 3
    assert [len(table) for table in seq.pages] == [3, 3]
    assert pool.memory.audit([seq]) == []


@pytest.mark.parametrize(("length", "kept"), [(21, 21), (20, 20), (19, 16), (16, 16), (5, 4), (4, 4), (3, 0), (0, 0)])
def test_published_pages_are_left_whole(length: int, kept: int) -> None:
    pool = Pool(30, 4, cache=True, windows=(None,))
    seq = computed(pool, prompted(1, *range(10, 32)))
    pool.memory.on_draft_kv(seq, 18)
    pool.memory.truncate(seq, length)
    assert seq.num_scheduled_tokens == kept, "a page of the prefix cache is never written again"
    assert seq.drafts.model_len == min(18, kept)
    assert pool.memory.usage.cached == 5
    assert len(nodes_with(pool.memory, seq, 5)) == 5
    assert pool.memory.audit([seq]) == []
    while seq.num_scheduled_tokens < len(seq.tokens):
        assert pool.compute(seq, CHUNK)
    assert pool.memory.audit([seq]) == []


def test_truncation_changes_nothing_at_or_behind_the_known_kv() -> None:
    pool = Pool(30, 4, cache=True, windows=(None, 9))
    seq = computed(pool, prompted(1, *range(10, 32)))
    before = [list(table) for table in seq.pages], seq.num_scheduled_tokens, pool.memory.usage
    for length in (22, 23, 1000):
        pool.memory.truncate(seq, length)
        assert ([list(table) for table in seq.pages], seq.num_scheduled_tokens, pool.memory.usage) == before


def test_other_readers_keep_the_nodes_that_a_truncated_sequence_leaves() -> None:
    pool = Pool(30, 4, cache=True, windows=(None,))
    first = computed(pool, prompted(1, *range(10, 32)))
    second = computed(pool, prompted(2, *range(10, 30), 99, 99))
    assert second.cache.nodes[:5] == first.cache.nodes
    pool.memory.truncate(first, 4)
    evict_unused(pool.memory)
    assert second.pages[0][:5] == pool.memory.tree.pages(second.cache.nodes[:5])  # type: ignore[union-attr]
    assert all(pool.memory.pages.owned()[CACHE].count(page) == 1 for page in second.pages[0][:5])
    assert pool.memory.audit([first, second]) == []


def test_positions_whose_window_has_passed_are_dropped_altogether() -> None:
    pool = Pool(60, 4, cache=True, windows=(None, 5))
    seq = computed(pool, prompted(1, *range(10, 50)))
    assert seq.first_pages[1] > 4
    pool.memory.truncate(seq, 16)
    assert (seq.num_scheduled_tokens, seq.first_pages) == (0, [0, 0])
    assert pool.memory.audit([seq]) == []
    while seq.num_scheduled_tokens < len(seq.tokens):
        assert pool.compute(seq, CHUNK)


def test_truncated_sequence_is_awaited_for_the_page_that_it_computes_next() -> None:
    pool = Pool(30, 4, cache=True, windows=(None,))
    seq = prompted(1, *range(10, 32))
    assert pool.admit(seq)
    assert pool.compute(seq, 8) == 8
    pool.memory.truncate(seq, 4)
    evict_unused(pool.memory)
    same, other = prompted(2, *range(10, 32)), prompted(3, *range(60, 80))
    assert pool.memory.waits_for_prefix(same)
    assert not pool.memory.waits_for_prefix(other)
    pool.compute(seq, 4)
    assert same.cache.awaited_key != seq.cache.pending_key


def test_truncated_sequence_forgets_where_its_match_ended() -> None:
    pool = Pool(30, 4, cache=True, windows=(None,))
    for number in (1, 2):
        seq = computed(pool, prompted(number, *range(10, 32)))
        if number == 1:
            pool.memory.release(seq)
    assert seq.cache.start == seq.cache.nodes[4]
    pool.memory.truncate(seq, 9)
    assert seq.cache.start == seq.cache.nodes[1] == seq.cache.nodes[-1]


def test_sequence_without_pages_is_not_truncated() -> None:
    pool = Pool(30, 4, cache=True, windows=(None,))
    seq = prompted(1, 5, 6, 7)
    pool.memory.truncate(seq, 0)
    assert (seq.pages, seq.num_scheduled_tokens) == ((), 0)


class Truncations(RuleBasedStateMachine):
    """Every order of admissions, chunks, truncations, evictions and ends of sequences with common beginnings."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        cache=st.booleans(),
        windows=st.sampled_from([(None,), (None, 7, 7), (9,), (None, 10, 3)]),
        room=st.integers(1, 4),
    )
    def start(self, page_size: int, cache: bool, windows: Windows, room: int) -> None:
        self.pool = Pool(1 + room * len(windows) * LONGEST // page_size, page_size, cache, windows)
        self.sequences: dict[int, Sequence] = {}
        self.count = 0

    @property
    def memory(self) -> KVManager:
        return self.pool.memory

    @rule(
        length=st.integers(1, LONGEST),
        branch=st.sampled_from([0, 4, 8, 17]),
        kind=st.integers(0, 1),
        session=st.sampled_from(["", "", "x"]),
    )
    def admit(self, length: int, branch: int, kind: int, session: str) -> None:
        self.count += 1
        tokens = [*range(branch), *range(100 * kind, 100 * kind + LONGEST)][:length]
        known = {found.name for found in self.memory.sessions.known if found.turn is not None}
        session = session if self.memory.tree is not None and session not in known else ""
        seq = prompted(self.count, *tokens, session=session)
        if session:
            self.memory.sessions.begin_turn(session, seq.id)
        if self.pool.admit(seq):
            self.sequences[seq.id] = seq
        elif session:
            self.memory.sessions.end_turn(session, seq.id, 0.0, None)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, CHUNK))
    def compute(self, data: st.DataObject, count: int) -> None:
        seq = self._any(data)
        if data.draw(st.booleans()):
            self.memory.rematch(seq)
        if seq.num_scheduled_tokens < len(seq.tokens):
            self.pool.compute(seq, count)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), length=st.integers(0, LONGEST))
    def truncate(self, data: st.DataObject, length: int) -> None:
        seq, memory = self._any(data), self.memory
        known, free = seq.num_scheduled_tokens, memory.usage.free
        before = self._others(seq)
        cached = [] if memory.tree is None else sorted(memory.pages.owned().get(CACHE, []))
        memory.truncate(seq, length)
        assert seq.num_scheduled_tokens <= min(known, max(length, 0))
        assert len(seq.pages[0]) * self.pool.page_size >= seq.num_scheduled_tokens
        assert memory.usage.free >= free
        assert self._others(seq) == before
        assert ([] if memory.tree is None else sorted(memory.pages.owned().get(CACHE, []))) == cached
        if self.pool.windows == (None,) and memory.tree is None:
            assert seq.num_scheduled_tokens == min(known, length)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), truncated=st.booleans(), length=st.integers(0, LONGEST))
    def end(self, data: st.DataObject, truncated: bool, length: int) -> None:
        seq = self._any(data)
        seq.outcome = Finished(seq.request_id, FinishReason.LENGTH)
        if truncated:
            self.memory.truncate(seq, length)
        if seq.submit.session:
            self.memory.end_turn(seq, 0.0)
        self.memory.release(seq)
        del self.sequences[seq.id]

    @rule()
    def evict(self) -> None:
        if self.memory.tree is not None:
            evict_unused(self.memory)

    @rule(share=st.integers(1, 3))
    def crowd(self, share: int) -> None:
        """Have another owner take pages for a moment, so that cached ones are reused."""
        if count := self.memory.usage.free // share:
            occupy(self.memory, count)
            vacate(self.memory)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        assert self.memory.audit(self.sequences.values()) == []

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for seq in self.sequences.values():
                self.memory.release(seq)
            end_sessions(self.memory)
            assert self.memory.usage.in_use == 0
            assert self.memory.audit([]) == []

    def _any(self, data: st.DataObject) -> Sequence:
        return self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]

    def _others(self, seq: Sequence) -> list[tuple[list[list[int]], list[int], int]]:
        return [
            ([list(table) for table in other.pages], list(other.cache.nodes), other.num_scheduled_tokens)
            for other in self.sequences.values()
            if other is not seq
        ]


Truncations.TestCase.settings = machine(60, 40)
TestTruncations = Truncations.TestCase
