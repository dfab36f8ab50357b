"""Compilation outside the loop: results, deadlines, cancellation and cache."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.compile_lane import CompileLane
from tandem.engine_core.constraints.compiler import CPU_SECONDS, GrammarCompiler, compile_lanes
from tandem.engine_core.constraints.cpu_times import CpuTimes
from tandem.engine_core.constraints.grammars import CROWDED, CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.errors import RequestError
from tandem.engine_core.stats import new_stats
from tandem.protocol.errors import ErrorCode
from tests.fakes.clock import FakeClock
from tests.support.serving import until

WAIT = 30.0


class FakeCpuTimes(CpuTimes):
    """CPU times that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, float] = {}

    def seconds(self, grammar: str) -> float:
        return self.taken.get(grammar, 0.0)


class Workshop:
    """A compiler whose grammars are texts; one that begins with "slow" waits for the gate."""

    def __init__(self, compiled_grammar: CompiledGrammar, *lanes: CompileLane, **sizes: Any) -> None:
        self.compiled_grammar = compiled_grammar
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.news = threading.Semaphore(0)
        self.clock = FakeClock()
        self.cpu_times = FakeCpuTimes()
        self.compiler = GrammarCompiler(
            self.compile, lanes or (CompileLane("all", 2),), self.news.release, new_stats(), self.clock,
            limit_seconds=10.0, cpu_times=self.cpu_times, **sizes,
        )  # fmt: skip

    def compile(self, grammar: str) -> CompiledGrammar:
        self.compiled.append(grammar)
        if grammar.startswith("slow"):
            assert self.gate.wait(WAIT)
        if grammar == "bad":
            raise RequestError(ErrorCode.INVALID_GRAMMAR, "it is bad")
        if grammar == "bug":
            raise KeyboardInterrupt("a panic")
        return self.compiled_grammar

    def start(self, seq_id: int, grammar: str, key: str = "", seconds: float = 0.0) -> None:
        self.compiler.start(seq_id, grammar, seq_id % 2 == 1, key, seconds)

    def after_news(self) -> dict[int, Any]:
        assert self.news.acquire(timeout=WAIT), "the loop was never woken"
        return dict(self.compiler.take_finished())

    def until_ready(self, number: int) -> list[int]:
        """Return the ids of this many sequences in the order of their results."""
        ready: list[int] = []
        while len(ready) < number:
            ready += self.after_news()
        return ready


@pytest.fixture(scope="module")
def compiled_grammar(grammars: Grammars) -> CompiledGrammar:
    return grammars.compile(LLMatcher.grammar_from_regex("a+"))


@pytest.fixture
def shop(compiled_grammar: CompiledGrammar) -> Iterator[Workshop]:
    shop = Workshop(compiled_grammar)
    yield shop
    shop.gate.set()
    shop.compiler.close()


def test_grammar_is_ready_after_the_loop_was_woken(shop: Workshop) -> None:
    shop.start(7, "x")
    ready = shop.after_news()
    assert isinstance(ready[7], GrammarConstraint)
    assert ready[7].ignore_ends
    assert shop.compiler.take_finished() == []
    assert sum(shop.compiler.stats.compile_time.counts) == 1


def test_one_compilation_serves_waiting_and_later_sequences(shop: Workshop) -> None:
    for seq_id in (1, 2, 3):
        shop.start(seq_id, "slow")
    assert shop.compiler.take_finished() == []
    shop.gate.set()
    ready = shop.after_news()
    assert sorted(ready) == [1, 2, 3]
    assert [ready[seq_id].ignore_ends for seq_id in (1, 2, 3)] == [True, False, True]
    assert len({id(each.matcher) for each in ready.values()}) == 3
    shop.start(4, "slow")
    ((seq_id, _),) = shop.compiler.take_finished()
    assert seq_id == 4, "at once"
    assert shop.compiled == ["slow"]


def test_key_of_each_request_pays_for_its_masks(shop: Workshop) -> None:
    for seq_id, key in enumerate(("alice", "bob", "")):
        shop.start(seq_id, "slow", key)
    shop.gate.set()
    assert [each.cost.key for _, each in sorted(shop.after_news().items())] == ["alice", "bob", ""]
    shop.start(3, "slow", "carol")
    ((_, ready),) = shop.compiler.take_finished()
    assert isinstance(ready, GrammarConstraint) and ready.cost.key == "carol", "of a grammar that is cached"


def test_slow_grammar_delays_no_other(shop: Workshop) -> None:
    shop.start(1, "slow")
    shop.start(2, "quick")
    assert list(shop.after_news()) == [2]
    shop.gate.set()
    assert list(shop.after_news()) == [1]


def test_slow_grammars_of_a_key_delay_none_of_another_key(shop: Workshop) -> None:
    for seq_id in range(16):
        shop.start(seq_id, f"slow {seq_id}", "alice")
    shop.start(16, "quick", "alice")
    for seq_id in (20, 21):
        shop.start(seq_id, f"quick {seq_id}", "bob")
        assert list(shop.after_news()) == [seq_id]
    shop.start(22, "quick", "bob")
    assert list(shop.after_news()) == [16, 22], "one that alice waits for as well"


@pytest.mark.parametrize(("grammar", "message"), [("bad", "it is bad"), ("bug", "does not compile: a panic")])
def test_failed_grammar_is_compiled_again_for_the_next_request(shop: Workshop, grammar: str, message: str) -> None:
    for seq_id in (1, 2):
        shop.start(seq_id, grammar)
        error = shop.after_news()[seq_id]
        assert isinstance(error, RequestError)
        assert error.code is ErrorCode.INVALID_GRAMMAR
        assert message in error.message
    assert shop.compiled == [grammar, grammar]


def test_slow_grammars_wait_for_one_another_and_quick_ones_for_none_of_them(compiled_grammar: CompiledGrammar) -> None:
    shop = Workshop(compiled_grammar, *compile_lanes())
    for seq_id in range(16):
        shop.start(seq_id, f"slow {seq_id}", seconds=3.0)
    for seq_id in range(20, 24):
        shop.start(seq_id, f"middle {seq_id}", seconds=0.2)
        assert list(shop.after_news()) == [seq_id]
        shop.start(seq_id + 10, f"quick {seq_id}", seconds=0.002)
        assert list(shop.after_news()) == [seq_id + 10]
    until(lambda: any(grammar.startswith("slow") for grammar in shop.compiled), "the first slow one is compiled")
    assert [grammar for grammar in shop.compiled if grammar.startswith("slow")] == ["slow 0"]
    shop.gate.set()
    assert shop.until_ready(16) == list(range(16))
    shop.compiler.close()


def test_a_grammar_that_was_said_to_be_quick_and_is_not_gives_way_to_others(compiled_grammar: CompiledGrammar) -> None:
    shop = Workshop(compiled_grammar, CompileLane("lane", 1, spare_threads=2, overrun_seconds=0.25))
    for number in range(2):
        shop.start(number, f"slow {number}")
        shop.start(10 + number, f"quick {number}")
        shop.clock.advance(0.25)
        assert shop.compiler.take_finished() == []
        shop.clock.advance(0.25)
        assert shop.compiler.take_finished() == []
        assert list(shop.after_news()) == [10 + number]
    shop.start(2, "slow 2")
    shop.start(12, "quick 2")
    shop.clock.advance(1)
    assert shop.compiler.take_finished() == [], "no spare thread is left"
    shop.gate.set()
    assert set(shop.until_ready(4)) == {0, 1, 2, 12}
    shop.start(3, "another")
    assert shop.until_ready(1) == [3]
    shop.compiler.close()


def test_overdue_request_fails_and_the_next_finds_the_result(shop: Workshop) -> None:
    shop.start(1, "slow")
    shop.clock.advance(6)
    shop.start(2, "slow")
    shop.clock.advance(4)
    ((seq_id, error),) = shop.compiler.take_finished()
    assert seq_id == 1
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.OVERLOADED, "it has waited, and used no CPU time"
    assert "not compiled within 10 s" in error.message and error.retry_after == 10
    shop.gate.set()
    assert list(shop.after_news()) == [2]
    shop.start(3, "slow")
    assert [seq_id for seq_id, _ in shop.compiler.take_finished()] == [3]


def test_only_a_grammar_that_used_its_own_time_is_invalid(compiled_grammar: CompiledGrammar) -> None:
    shop = Workshop(compiled_grammar, CompileLane("one", 1))
    shop.start(1, "slow and guilty")
    shop.start(2, "behind it")
    shop.cpu_times.taken["slow and guilty"] = CPU_SECONDS
    shop.clock.advance(10)
    errors = dict(shop.compiler.take_finished())
    assert [errors[seq_id].code for seq_id in (1, 2)] == [ErrorCode.INVALID_GRAMMAR, ErrorCode.OVERLOADED]
    assert "6 s of CPU time" in errors[1].message
    shop.gate.set()
    shop.compiler.close()


def test_cancelled_sequence_gets_no_result(shop: Workshop) -> None:
    shop.start(1, "slow")
    shop.start(2, "slow")
    shop.compiler.cancel(1)
    shop.compiler.cancel(1)
    shop.compiler.cancel(99)
    shop.gate.set()
    assert list(shop.after_news()) == [2]


def test_sequence_cancelled_when_ready_gets_no_result(shop: Workshop) -> None:
    shop.start(1, "x")
    shop.after_news()
    for seq_id in (2, 3):
        shop.start(seq_id, "x")
    shop.compiler.cancel(2)
    assert [seq_id for seq_id, _ in shop.compiler.take_finished()] == [3]


def test_compilation_that_no_sequence_wants_is_not_started(compiled_grammar: CompiledGrammar) -> None:
    shop = Workshop(compiled_grammar, CompileLane("one", 1))
    shop.start(1, "slow")
    shop.start(2, "never")
    shop.compiler.cancel(2)
    shop.start(3, "later")
    shop.gate.set()
    ready = shop.after_news() | shop.after_news()
    assert list(ready) == [1, 3]
    assert shop.compiled == ["slow", "later"]
    shop.compiler.close()


def test_running_compilation_without_waiters_may_be_joined_again(shop: Workshop) -> None:
    shop.start(1, "slow")
    while not shop.compiled:
        assert not shop.gate.wait(0.001)
    shop.compiler.cancel(1)
    shop.start(2, "slow")
    shop.gate.set()
    assert list(shop.after_news()) == [2]
    assert shop.compiled == ["slow"]


def test_cache_drops_the_least_recently_used_grammar(compiled_grammar: CompiledGrammar) -> None:
    shop = Workshop(compiled_grammar, cached=2)
    for seq_id, grammar in enumerate(["a", "b"]):
        shop.start(seq_id, grammar)
        shop.after_news()
    shop.start(2, "a")
    assert len(shop.compiler.take_finished()) == 1
    shop.start(3, "c")
    shop.after_news()
    shop.start(4, "a")
    assert len(shop.compiler.take_finished()) == 1, "used after b"
    shop.start(5, "b")
    assert list(shop.after_news()) == [5]
    assert shop.compiled == ["a", "b", "c", "b"]
    shop.compiler.close()


def test_close_drops_compilations_not_yet_started(compiled_grammar: CompiledGrammar) -> None:
    shop = Workshop(compiled_grammar, CompileLane("one", 1))
    shop.start(1, "slow")
    shop.start(2, "never")
    shop.compiler.close()
    shop.gate.set()
    assert list(shop.after_news()) == [1]
    assert shop.compiled == ["slow"]


class TestCrowdedGrammar:
    """A grammar of many sequences is compiled again, apart from the first time."""

    def shop(self, grammars: Grammars, max_bases: int) -> Workshop:
        shop = Workshop(
            grammars.compile(LLMatcher.grammar_from_regex("a+")),
            CompileLane("quick", 1, 0.03),
            CompileLane("slow", 1),
            max_bases=max_bases,
        )
        shop.compiler.compile_grammar = self.compile_anew(shop, grammars)
        return shop

    def compile_anew(self, shop: Workshop, grammars: Grammars) -> Callable[[str], CompiledGrammar]:
        def compile_grammar(grammar: str) -> CompiledGrammar:
            shop.compile(grammar)
            return grammars.compile(LLMatcher.grammar_from_regex("a+"))

        return compile_grammar

    def start_many(self, shop: Workshop, count: int, seconds: float = 0.0) -> list[GrammarConstraint]:
        for seq_id in range(count):
            shop.start(seq_id, "x", seconds=seconds)
        ready: list[GrammarConstraint] = []
        while len(ready) < count or shop.compiler.is_busy:
            ready += shop.after_news().values()
        return ready

    def test_it_gets_bases_until_none_is_crowded(self, grammars: Grammars) -> None:
        shop = self.shop(grammars, max_bases=8)
        held = self.start_many(shop, 3 * CROWDED - 1)
        sizes = Counter(id(each.base) for each in held)
        assert shop.compiled == ["x"] * 3
        assert len(sizes) == 3 and max(sizes.values()) - min(sizes.values()) <= 2
        shop.compiler.close()

    def test_no_more_than_there_are_threads(self, grammars: Grammars) -> None:
        shop = self.shop(grammars, max_bases=2)
        held = self.start_many(shop, 4 * CROWDED)
        assert shop.compiled == ["x"] * 2
        assert set(Counter(id(each.base) for each in held).values()) == {2 * CROWDED}
        shop.compiler.close()

    @pytest.mark.parametrize(
        ("count", "seconds", "max_bases"), [(CROWDED - 1, 0.0, 8), (CROWDED, 1.0, 8), (99, 0.0, 1)]
    )
    def test_few_sequences_slow_grammars_and_single_threads_have_one(
        self, grammars: Grammars, count: int, seconds: float, max_bases: int
    ) -> None:
        shop = self.shop(grammars, max_bases)
        self.start_many(shop, count, seconds)
        shop.start(1000, "x", seconds=seconds)
        assert not shop.compiler.is_busy
        assert shop.compiled == ["x"]
        shop.compiler.close()

    def test_sequences_of_a_cached_grammar_ask_for_another_base(self, grammars: Grammars) -> None:
        shop = self.shop(grammars, max_bases=8)
        held = self.start_many(shop, 1)
        for seq_id in range(1, CROWDED):
            shop.start(seq_id, "x")
        held += [constraint for _, constraint in shop.compiler.take_finished()]
        assert len(held) == CROWDED and shop.compiler.is_busy
        assert shop.after_news() == {}, "nobody waited for it"
        assert Counter(id(each.base) for each in held).most_common(1)[0][1] == CROWDED // 2
        assert shop.compiled == ["x", "x"] and not shop.compiler.is_busy
        shop.compiler.close()
