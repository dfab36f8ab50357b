"""Requests that end because their masks take too long, and other requests in the same steps."""

import re
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint
from tandem.engine_core.constraints.mask_budget import CLEAR_SECONDS, FREE_SECONDS, KEY_SECONDS, REQUEST_SECONDS
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.stats import new_stats
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.engine_core.constraints.conftest import ENDS
from tests.fakes.clock import FakeClock
from tests.fakes.slow_matcher import SlowMatcher
from tests.support.engine_driver import DrivenEngine

WORDS = 4


class Bench:
    """A mask builder with fake clocks, and constraints with masks of given durations."""

    def __init__(self) -> None:
        self.cpu, self.wall = FakeClock(), FakeClock()
        self.mask_builder = MaskBuilder(ENDS, new_stats(), self.wall, self.cpu)
        self._copies: dict[GrammarConstraint, SlowMatcher] = {}

    def constraint(self, cpu: float = 0.0, wall: float = 0.0, key: str = "") -> GrammarConstraint:
        matcher = SlowMatcher((self.cpu, cpu), (self.wall, wall))
        constraint = CompiledGrammar(cast("LLMatcher", matcher), frozenset(ENDS)).constraint(False, key)
        (self._copies[constraint],) = matcher.copies
        return constraint

    def num_masks(self, constraint: GrammarConstraint) -> int:
        """Return the number of masks that were computed of a constraint."""
        return self._copies[constraint].num_masks

    def step(self, constraints: list[GrammarConstraint]) -> np.ndarray[Any, Any]:
        """Fill the masks of a step, from the last row of the output to the first."""
        out = np.zeros((len(constraints), WORDS), dtype=np.int32)
        self.mask_builder.fill([(each, len(out) - 1 - row) for row, each in enumerate(constraints)], out)
        assert (out == -1).all(), "every row has its mask"
        return out


def test_costly_constraint_ends_and_its_neighbours_go_on() -> None:
    bench = Bench()
    costly = REQUEST_SECONDS * 0.4
    rows = [bench.constraint(FREE_SECONDS, FREE_SECONDS), bench.constraint(costly, costly), bench.constraint()]
    for _ in range(4):
        bench.step(rows)
    assert [bool(each.problem) for each in rows] == [False, True, False]
    assert [each.accept(7) for each in rows] == [True, False, True]
    assert not rows[1].accept(ENDS[0]), "an end is no way out"
    assert [bench.num_masks(each) for each in rows] == [4, 3, 4], "a constraint that has ended costs nothing"


def test_stalls_and_a_loaded_machine_end_nothing() -> None:
    bench = Bench()
    rows = [bench.constraint(cpu=FREE_SECONDS / 2, wall=10.0) for _ in range(3)]
    for _ in range(100):
        bench.step(rows)
    assert not any(each.problem for each in rows)


def test_costly_mask_is_charged_its_own_cpu_time_only() -> None:
    """Cheap masks before it, and a pause of the thread after it, are not."""
    bench = Bench()
    cheap = [bench.constraint(cpu=FREE_SECONDS / 2, wall=FREE_SECONDS / 2) for _ in range(20)]
    costly = bench.constraint(cpu=FREE_SECONDS + 0.02, wall=0.5)
    bench.step([*cheap, costly])
    assert costly.cost.debt == pytest.approx(0.02)
    bench.step([*cheap, costly])
    assert costly.cost.debt == pytest.approx(0.04)
    assert not any(each.cost.debt for each in cheap)


def test_step_stops_computing_costly_masks_when_their_key_has_none_left() -> None:
    bench = Bench()
    rows = [bench.constraint(CLEAR_SECONDS * 2, CLEAR_SECONDS * 2, key="a") for _ in range(8)]
    other = bench.constraint(CLEAR_SECONDS * 2, CLEAR_SECONDS * 2, key="b")
    for _ in range(2):
        bench.step([*rows, other])
    taken = sum(bench.num_masks(each) for each in rows) * (CLEAR_SECONDS * 2 - FREE_SECONDS)
    assert KEY_SECONDS < taken - len(rows) * CLEAR_SECONDS < KEY_SECONDS + CLEAR_SECONDS * 2
    assert any(each.problem for each in rows)
    assert bench.num_masks(other) == 2 and not other.problem


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_engine_ends_a_request_with_costly_masks_once_and_serves_the_others(pipeline: str) -> None:
    driven, cpu = DrivenEngine.build(EngineOptions(device="cpu", pipeline=pipeline, max_len=512)), FakeClock()
    engine = driven.engine
    compiler, runtime = engine.compiler, engine.runtime
    assert isinstance(compiler, GrammarCompiler) and isinstance(runtime, TorchRuntime)
    costs = {"costly": REQUEST_SECONDS * 0.4, "cheap": FREE_SECONDS}
    compiler.compile_grammar = lambda grammar: CompiledGrammar(
        cast("LLMatcher", SlowMatcher((cpu, costs[grammar]))), frozenset()
    )
    assert isinstance(runtime.filler, MaskBuilder)
    runtime.filler.cpu_clock = runtime.filler.clock = cpu
    params = SamplingParams(12, ignore_eos=True)
    ids = {name: driven.submit([5, 6, 7], params, constraint=name or None) for name in ("costly", "cheap", "")}
    driven.run()
    for name in ("cheap", ""):
        assert driven.outcome(ids[name]) == Finished(ids[name], FinishReason.LENGTH)
        assert len(driven.tokens(ids[name])) == 12
    failure = driven.outcome(ids["costly"])
    assert isinstance(failure, Failure) and failure.code is ErrorCode.GRAMMAR_FAILED
    assert re.search(r"\b2 tokens: .*\bmasks\b", failure.message)
    assert len(driven.tokens(ids["costly"])) == 2
    assert not engine.scheduler.num_open and not list(engine.scheduler.held)
