"""Requests that end because their masks take too long, and others beside them."""

from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint
from tandem.engine_core.constraints.mask_budget import CLEAR_SECONDS, FREE_SECONDS, KEY_SECONDS, REQUEST_SECONDS
from tandem.engine_core.constraints.mask_builder import MEASURED_AT_ONCE, MEASURED_MASKS, SLOW_SECONDS, MaskBuilder
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.stats import new_stats
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.engine_core.constraints.conftest import ENDS
from tests.fakes.clock import FakeClock
from tests.fakes.slow_matcher import SlowExecutor, SlowMatcher
from tests.support.engine_driver import DrivenEngine

WORDS = 4


class Bench:
    """A mask builder with fake clocks, and constraints whose masks take as long as is said."""

    def __init__(self, executor: SlowExecutor | None = None) -> None:
        self.cpu, self.wall = FakeClock(), FakeClock()
        threads = {2: cast("LLExecutor", executor)} if executor else {}
        self.mask_builder = MaskBuilder(threads, ENDS, new_stats(), self.wall, self.cpu)

    def constraint(self, cpu: float = 0.0, wall: float = 0.0, key: str = "") -> GrammarConstraint:
        matcher = cast("LLMatcher", SlowMatcher((self.cpu, cpu), (self.wall, wall)))
        return CompiledGrammar(matcher, frozenset(ENDS)).constraint(ignore_ends=False, key=key)

    def step(self, constraints: list[GrammarConstraint]) -> np.ndarray[Any, Any]:
        """Fill the masks of a step, from the last row of the output to the first."""
        out = np.zeros((len(constraints), WORDS), dtype=np.int32)
        self.mask_builder.fill([(each, len(out) - 1 - row) for row, each in enumerate(constraints)], out)
        assert (out == -1).all(), "every row has its mask"
        return out


def num_masks(constraint: GrammarConstraint) -> int:
    return cast("SlowMatcher", constraint.matcher).num_masks


def test_costly_constraint_ends_and_its_neighbours_go_on() -> None:
    bench = Bench()
    costly = REQUEST_SECONDS * 0.4
    rows = [bench.constraint(FREE_SECONDS, FREE_SECONDS), bench.constraint(costly, costly), bench.constraint()]
    for _ in range(4):
        bench.step(rows)
    assert [bool(each.problem) for each in rows] == [False, True, False]
    assert [each.accept(7) for each in rows] == [True, False, True]
    assert not rows[1].accept(ENDS[0]), "an end is no way out"
    assert [num_masks(each) for each in rows] == [4, 3, 4], "a constraint that has ended costs nothing"


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
    taken = sum(num_masks(each) for each in rows) * (CLEAR_SECONDS * 2 - FREE_SECONDS)
    assert KEY_SECONDS < taken - len(rows) * CLEAR_SECONDS < KEY_SECONDS + CLEAR_SECONDS * 2
    assert any(each.problem for each in rows)
    assert num_masks(other) == 2 and not other.problem


class TestParallel:
    def test_quick_steps_are_left_to_the_threads(self) -> None:
        bench = Bench(executor := SlowExecutor())
        rows = [bench.constraint(FREE_SECONDS) for _ in range(40)]
        for _ in range(3):
            bench.step(rows)
        assert executor.num_masks == [40] * 3

    def test_slow_step_has_some_constraints_measured_until_each_was(self) -> None:
        bench = Bench(executor := SlowExecutor())
        rows = [bench.constraint(wall=SLOW_SECONDS / 16) for _ in range(16)]
        bench.step(rows)
        for each in rows:
            cast("SlowMatcher", each.matcher).costs = ()
        for _ in range(16 * MEASURED_MASKS // MEASURED_AT_ONCE + 1):
            bench.step(rows)
        assert executor.num_masks == [16, *[16 - MEASURED_AT_ONCE] * (2 * MEASURED_MASKS), 16]

    def test_step_of_which_all_are_measured_leaves_the_threads_alone(self) -> None:
        bench = Bench(executor := SlowExecutor())
        rows = [bench.constraint(wall=SLOW_SECONDS) for _ in range(MEASURED_AT_ONCE)]
        for _ in range(1 + MEASURED_MASKS):
            bench.step(rows)
        assert executor.num_masks == [MEASURED_AT_ONCE]
        assert [num_masks(each) for each in rows] == [1 + MEASURED_MASKS] * MEASURED_AT_ONCE

    def test_costly_constraint_among_many_ends(self) -> None:
        bench = Bench(SlowExecutor())
        costly = bench.constraint(cpu=0.1, wall=0.1)
        rows = [*[bench.constraint(FREE_SECONDS / 10) for _ in range(100)], costly]
        for _ in range(100):
            bench.step(rows)
            if costly.problem:
                break
        assert [each for each in rows if each.problem] == [costly]

    def test_more_costly_constraints_than_are_measured_at_once_all_end(self) -> None:
        bench = Bench(SlowExecutor())
        rows = [bench.constraint(cpu=0.02, wall=0.02, key="a") for _ in range(3 * MEASURED_AT_ONCE)]
        cheap = [bench.constraint() for _ in range(8)]
        for _ in range(60):
            rows = [each for each in rows if not each.problem]
            bench.step([*rows, *cheap])
        assert not rows
        assert not any(each.problem for each in cheap)


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
    assert failure.message.startswith("the grammar cannot be followed any further after 2 tokens: its masks took ")
    assert len(driven.tokens(ids["costly"])) == 2
    assert not engine.scheduler.num_open and not list(engine.scheduler.held)
