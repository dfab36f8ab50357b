"""Tokens that many matchers accept ahead, on threads or not."""

from collections.abc import Sequence
from random import Random
from typing import cast

import pytest
from llguidance import LLExecutor, LLMatcher

from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.faster_way import PROBE_EVERY
from tandem.engine_core.constraints.grammars import GrammarConstraint, Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.threads import PARALLEL_ROWS
from tandem.engine_core.constraints.token_acceptor import TokenAcceptor
from tandem.engine_core.contracts import Constraint
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.slow_matcher import SlowExecutor
from tests.support.engine_driver import DrivenEngine

REGEX = LLMatcher.grammar_from_regex("[a-d]{1,30}")


def constraints(grammars: Grammars, rows: int) -> list[GrammarConstraint]:
    """Return constraints of two bases, in turns."""
    compiled = grammars.compile(REGEX)
    compiled.add_base(grammars.compile(REGEX).bases[0].matcher)
    held = [(base, base.matcher.deep_copy()) for base in compiled.bases * (rows // 2)]
    return [GrammarConstraint(matcher, base, frozenset(ENDS), False) for base, matcher in held]


def test_outcome_is_that_of_accepting_each_token_by_itself(grammars: Grammars) -> None:
    """Among them tokens that the grammar rejects, ends where it may not end yet, and ids that do not exist."""
    random, acceptor = Random(5), TokenAcceptor({2: LLExecutor(2)}, FakeClock())
    ahead, alone = (constraints(grammars, 2 * PARALLEL_ROWS) for _ in range(2))
    letters = [grammars.prepare().tokenize_str(letter)[0] for letter in "abcd"]
    num_rejected = 0
    for step in range(2 * PROBE_EVERY):
        choices = [*letters * 40, 300, *ENDS, VOCAB, VOCAB + 7]
        pairs = [(each, random.choice(choices if step else letters)) for each in ahead]
        acceptor.accept_ahead(pairs)
        assert all(each.ahead for each in ahead)
        for (each, token), reference in zip(pairs, alone, strict=True):
            assert each.accept(token) == reference.accept(token)
            assert (each.problem, each.is_complete) == (reference.problem, reference.is_complete)
            num_rejected += bool(each.problem)
    assert num_rejected > 100


def test_token_given_ahead_is_not_given_again(grammars: Grammars) -> None:
    acceptor, held = TokenAcceptor({2: LLExecutor(2)}, FakeClock()), constraints(grammars, 2 * PARALLEL_ROWS)
    (a,), (z,) = (grammars.prepare().tokenize_str(letter) for letter in "az")
    acceptor.accept_ahead([(each, a) for each in held])
    with pytest.raises(AssertionError, match="accepted ahead"):
        held[0].accept(z)
    for each in held[1:]:
        assert each.accept(a)
        assert all(each.accept(a) for _ in range(29))
        assert each.is_complete, "30 letters in all"


def test_overdrawn_constraints_accept_nothing(grammars: Grammars) -> None:
    executor = SlowExecutor()
    acceptor = TokenAcceptor({2: cast("LLExecutor", executor)}, FakeClock())
    held = constraints(grammars, 2 * PARALLEL_ROWS)
    for each in held:
        each.overdrawn = "too slow"
    acceptor.accept_ahead([(each, 300) for each in held])
    assert not any(each.ahead or each.accept(300) for each in held)


def test_few_rows_are_left_for_later(grammars: Grammars) -> None:
    acceptor, held = TokenAcceptor({2: LLExecutor(2)}, FakeClock()), constraints(grammars, 2 * PARALLEL_ROWS - 2)
    acceptor.accept_ahead([(each, 300) for each in held])
    assert not any(each.ahead for each in held)
    acceptor.accept_ahead([])


class CountingAcceptor(TokenAcceptor):
    """Acceptor that knows the most tokens that it accepted at once."""

    most = 0

    def accept_ahead(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        super().accept_ahead(tokens)
        self.most = max(self.most, sum(cast("GrammarConstraint", each).ahead is not None for each, _ in tokens))


def outputs(rows: int, acceptor: TokenAcceptor | None) -> list[list[int]]:
    """Return the outputs of rows at temperature 1, of which two thirds follow one grammar."""
    driven = DrivenEngine.build(EngineOptions(device="cpu", max_len=256, max_rows=rows, pipeline="on"))
    compiler, runtime = driven.engine.compiler, driven.engine.runtime
    assert isinstance(compiler, GrammarCompiler) and isinstance(runtime, TorchRuntime)
    assert isinstance(runtime.filler, MaskBuilder)
    driven.engine.acceptor, compiler.max_bases = acceptor, 2 if acceptor else 1
    runtime.filler.executors = acceptor.executors if acceptor else {}
    schema = LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "string", "maxLength": 9}})
    # The first have the grammar compiled; the others find as many bases as there may be.
    for wave in range(2):
        for row in range(rows):
            params = SamplingParams(6 + 10 * wave + row % 7, temperature=1.0, seed=row)
            driven.submit([7, 8, row + 9], params, constraint=schema if row % 3 else None)
        driven.run()
        while compiler.is_busy:
            driven.engine.tick()
    return [driven.tokens(request_id) for request_id in range(1, 2 * rows + 1)]


def test_engine_with_threads_gives_the_tokens_of_one_without() -> None:
    acceptor = CountingAcceptor({2: LLExecutor(2)}, FakeClock())
    assert outputs(60, acceptor) == outputs(60, None)
    assert acceptor.most >= 2 * PARALLEL_ROWS
