"""Grammars of many requests, which workers compile too."""

import threading
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.compile_lane import CompileLane
from tandem.engine_core.constraints.grammars import CROWDED, WORKERS_SHARE, CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tests.fakes.inline_link import InlineLink
from tests.support.grammar_workshop import WAIT, Workshop
from tests.support.serving import until

TEXT = LLMatcher.grammar_from_regex("a+")


class TestManySequences:
    """Workers compile the grammars of many sequences too."""

    @pytest.fixture
    def shop(self, grammars: Grammars) -> Iterator[Workshop]:
        masks = MaskMemory()
        masks.allocate(1, 1)
        self.links = [InlineLink(grammars, masks) for _ in range(2)]
        links = iter(self.links)
        lanes = CompileLane("quick", 2, 0.03), CompileLane("slow", 1)
        shop = Workshop(grammars.compile(TEXT), *lanes, workers=WorkerPool(2, links.__next__))

        def compile_anew(grammar: str) -> CompiledGrammar:
            shop.compile(grammar)
            return grammars.compile(TEXT)

        shop.compiler.compile_grammar = compile_anew
        yield shop
        shop.gate.set()
        shop.compiler.close()

    def start_many(self, shop: Workshop, first: int, count: int, seconds: float = 0.0) -> list[GrammarConstraint]:
        for seq_id in range(first, first + count):
            shop.start(seq_id, TEXT, seconds=seconds)
        ready: list[GrammarConstraint] = []

        def all_are_ready() -> bool:
            ready.extend(each for _, each in shop.compiler.take_finished() if isinstance(each, GrammarConstraint))
            return len(ready) == count and not shop.compiler.is_busy

        until(all_are_ready, "the constraints")
        return ready

    def test_few_sequences_and_slow_grammars_need_no_worker(self, shop: Workshop) -> None:
        held = self.start_many(shop, 0, CROWDED - 1)
        held += self.start_many(shop, 500, 2 * CROWDED, seconds=1.0)
        assert not self.links[0].compiled
        assert not any(each.remote for each in held)

    def test_workers_are_added_until_each_has_few(self, shop: Workshop) -> None:
        held = self.start_many(shop, 0, CROWDED)
        assert [len(link.compiled) for link in self.links] == [1, 0]
        assert all(each.remote for each in held), "none had a token yet"
        held += self.start_many(shop, 500, WORKERS_SHARE + 1)
        assert [link.compiled for link in self.links] == [[TEXT], [TEXT]]
        held += self.start_many(shop, 900, 3)
        assert self.links[1].num_open >= 3, "the worker with the fewest gets the next"
        assert shop.compiled == [TEXT], "it was compiled here once"

    def test_grammars_of_one_sequence_each_go_to_workers_too(self, shop: Workshop) -> None:
        held = self.start_many(shop, 0, CROWDED)
        shop.start(1000, LLMatcher.grammar_from_regex("b+"))
        until(
            lambda: bool(held.extend(each for _, each in shop.compiler.take_finished())) or not shop.compiler.is_busy,
            "it",
        )
        assert len(held) == CROWDED + 1 and held[-1].remote
        assert self.links[1].num_open == 1, "the worker with the fewest"

    def test_a_worker_that_is_gone_costs_no_request(self, shop: Workshop) -> None:
        held = self.start_many(shop, 0, CROWDED)
        for link in self.links:
            link.lose("is gone")
        held += self.start_many(shop, 500, CROWDED)
        assert not any(each.remote for each in held[CROWDED:])
        assert len(held) == 2 * CROWDED

    def test_a_grammar_that_a_worker_refuses_is_given_to_no_other(self, shop: Workshop) -> None:
        def refuse(text: str) -> int | None:
            refused.append(text)
            raise RequestError(ErrorCode.INVALID_GRAMMAR, "the grammar does not compile: too large")

        refused: list[str] = []
        for link in self.links:
            link.compile = refuse  # type: ignore[method-assign]
        held = self.start_many(shop, 0, CROWDED)
        held += self.start_many(shop, 500, CROWDED)
        assert refused == [TEXT] and not any(each.remote for each in held)

    def test_a_grammar_that_no_worker_could_take_is_given_to_one_later(self, shop: Workshop) -> None:
        """As when one that does not answer in time has been replaced."""
        answers: list[str] = []

        def answer_not(text: str) -> int | None:
            answers.append(text)

        compile_there = [link.compile for link in self.links]
        for link in self.links:
            link.compile = answer_not  # type: ignore[method-assign]
        held = self.start_many(shop, 0, CROWDED)
        assert answers == [TEXT] * 2 and not any(each.remote for each in held)
        for link, compile_grammar in zip(self.links, compile_there, strict=True):
            link.compile = compile_grammar  # type: ignore[method-assign]
        held += self.start_many(shop, 500, 1)
        assert self.links[0].compiled == [TEXT] and held[0].remote

    def test_one_that_does_not_answer_is_given_up_by_requests_for_what_it_has(self, shop: Workshop) -> None:
        held = self.start_many(shop, 0, CROWDED)
        assert any(each.remote for each in held)
        held.clear()
        for link in self.links:
            link.post_and_wait()
            link._give_up("is gone")
        self.start_many(shop, 500, 1)
        assert [link.is_lost for link in self.links] == [True, True]

    def test_no_worker_is_asked_while_none_could_take_a_grammar(self, shop: Workshop) -> None:
        self.start_many(shop, 0, 1)
        workers = shop.compiler.workers
        assert workers is not None
        held = self.start_many(shop, 100, CROWDED)
        for link in self.links:
            link._give_up("does not answer")
        asked = len(self.links[0].compiled) + len(self.links[1].compiled)
        for seq_id in range(500, 500 + 2 * CROWDED):
            shop.start(seq_id, TEXT)
            assert not shop.compiler.is_busy
        assert len(self.links[0].compiled) + len(self.links[1].compiled) == asked and held

    def compile_late(self) -> tuple[threading.Event, threading.Event]:
        """Let the first worker compile only once the second event is set; the first event signals that it was asked
        to."""
        compiling, go_on = threading.Event(), threading.Event()
        link, compile_there = self.links[0], self.links[0].compile

        def compile_late(text: str) -> int | None:
            compiling.set()
            assert go_on.wait(WAIT)
            return compile_there(text)

        link.compile = compile_late  # type: ignore[method-assign]
        return compiling, go_on

    def test_a_worker_that_hangs_delays_no_grammar(self, shop: Workshop) -> None:
        """Not even one that the cache drops while the worker should compile it."""
        held = self.start_many(shop, 0, CROWDED - 1)
        ready: list[int] = []

        def are_ready(count: int) -> bool:
            ready.extend(seq_id for seq_id, _ in shop.compiler.take_finished())
            return len(ready) == count

        compiling, go_on = self.compile_late()
        shop.compiler.cached = 1
        shop.start(500, TEXT)
        assert compiling.wait(WAIT)
        for seq_id in range(600, 606):
            shop.start(seq_id, f"other {seq_id}")
        until(lambda: are_ready(7), "other grammars")
        shop.start(700, TEXT)
        until(lambda: are_ready(8), "the one that left the cache")
        assert shop.compiled.count(TEXT) == 2
        assert shop.compiler.is_busy, "the worker's result is still to come"
        go_on.set()
        until(lambda: are_ready(8) and not shop.compiler.is_busy, "the worker")
        assert sum(shop.compiler.stats.compile_time.counts) == 8, "without that of the worker"
        assert len(held) == CROWDED - 1

    @pytest.mark.parametrize("waiting", [[502, 503], []])
    def test_a_grammar_with_full_tables_is_recompiled(self, shop: Workshop, waiting: list[int]) -> None:
        """Though a worker compiles it when its next requests arrive."""
        held = self.start_many(shop, 0, CROWDED - 1)
        compiling, go_on = self.compile_late()
        shop.start(500, TEXT)
        assert compiling.wait(WAIT)
        held += [each for _, each in shop.compiler.take_finished() if isinstance(each, GrammarConstraint)]
        full = held[0].local.tables
        assert isinstance(full, CompiledGrammar)
        full.is_spent = True
        for seq_id in waiting:
            shop.start(seq_id, TEXT)
        go_on.set()
        until(lambda: held.extend(c for _, c in shop.compiler.take_finished()) or not shop.compiler.is_busy, "them")  # type: ignore[misc, func-returns-value]
        new = held[CROWDED:]
        assert len(new) == len(waiting)
        assert all(each.remote or each.local.tables is not full for each in new)
        assert shop.compiled == [TEXT] * (2 if waiting else 1)
