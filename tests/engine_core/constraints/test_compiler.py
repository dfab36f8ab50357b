"""Compilation outside the loop: results, deadlines, cancellation and cache."""

from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.compile_lane import CompileLane
from tandem.engine_core.constraints.compiler import CPU_SECONDS, compile_lanes
from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tests.support.grammar_workshop import Workshop
from tests.support.refusals import numbers_in
from tests.support.serving import until


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
    assert len({id(each.local) for each in ready.values()}) == 3
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


def test_a_slow_grammar_that_was_measured_as_quick_gives_way_to_others(compiled_grammar: CompiledGrammar) -> None:
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
    assert 10 in numbers_in(error.message) and error.retry_after == 10
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
    assert 6 in numbers_in(errors[1].message)
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
