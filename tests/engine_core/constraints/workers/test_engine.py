"""An engine with workers for grammars, which gives the tokens of one without, whatever becomes of them."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tandem.engine_core.constraints import grammars as grammars_module
from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.workers import link as link_module
from tandem.engine_core.constraints.workers import pool as pool_module
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.grammar_walks import WALKED
from tests.support.stopped_process import stop_process

ROWS = 64
CONSTRAINTS = [WALKED[name] for name in ("words", "record", "array", "one long text")]


@pytest.fixture(autouse=True)
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give workers the grammars of fewer requests than are worth it."""
    monkeypatch.setattr(grammars_module, "CROWDED", 8)
    monkeypatch.setattr(grammars_module, "WORKERS_SHARE", 8)
    # A busy machine may hold up a worker's start, or its answer, for seconds.
    monkeypatch.setattr(link_module, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(link_module, "COMPILE_SECONDS", 120.0)


def build(workers: int, pipeline: str = "on") -> DrivenEngine:
    options = EngineOptions(device="cpu", max_len=256, max_rows=ROWS, pipeline=pipeline, grammar_workers=workers)
    return DrivenEngine.build(options)


def pool_of(driven: DrivenEngine) -> WorkerPool:
    compiler = driven.engine.compiler
    assert isinstance(compiler, GrammarCompiler) and compiler.workers is not None
    return compiler.workers


def busiest(pool: WorkerPool) -> WorkerLink:
    """Return the worker with the most matchers."""
    return max(pool._links, key=lambda link: link.num_open)


def outputs(driven: DrivenEngine, interrupt: Callable[[], None] | None = None) -> list[list[int]]:
    """Return the outputs of two waves of requests, greedy and sampled, of which some have no grammar.

    The workers have the grammars at the latest when the second begins. interrupt: called in its middle.
    """
    engine, ids = driven.engine, []
    for wave in range(2):
        for row in range(ROWS):
            constraint = None if row % 9 == 8 else CONSTRAINTS[row % len(CONSTRAINTS)]
            params = SamplingParams(12 + row % 7 + 40 * (row % 5 == 0), temperature=float(row % 2), seed=row)
            ids.append(driven.submit([7, 8, row + 9], params, constraint=constraint))
        if wave and interrupt is not None:
            for _ in range(12):
                engine.tick()
            interrupt()
        driven.run()
        while engine.compiler.is_busy:
            engine.tick()
    assert all(isinstance(driven.outcome(request_id), Finished) for request_id in ids)
    return [driven.tokens(request_id) for request_id in ids]


def check_and_close(driven: DrivenEngine) -> None:
    """Check that rows, pages and slots came back; end the engine."""
    scheduler = driven.engine.scheduler
    assert not scheduler.running and not scheduler.held
    assert scheduler.memory.usage.in_use == 0
    pool = pool_of(driven)
    pool.post_awaited()
    pool.wait()
    assert [link.num_open for link in pool._links if not link.is_lost and link.num_open] == []
    children = [link._process.pid for link in pool._links]  # type: ignore[attr-defined]
    driven.engine.stopping = True
    driven.engine.run()
    assert not any(psutil.pid_exists(pid) for pid in children)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return outputs(build(0))


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_tokens_are_those_of_an_engine_without_workers(expected: list[list[int]], pipeline: str) -> None:
    driven, seen = build(2, pipeline), list[int]()

    def count() -> None:
        """Count the matchers that a worker has or had: one that is held up for 0.1 s gives some back."""
        seen.extend(link.num_open + link.num_given_back for link in pool_of(driven)._links)

    assert outputs(driven, count) == expected
    assert max(seen) >= 8 and len(seen) == 2
    num_compiled = sum(driven.engine.stats.compile_time.counts)
    assert num_compiled == len(CONSTRAINTS), "what workers compile again is not counted"
    check_and_close(driven)


def test_a_worker_that_is_killed_costs_no_request(expected: list[list[int]]) -> None:
    driven, lost = build(2), []

    def kill() -> None:
        lost.append(busiest(pool_of(driven)))
        assert lost[0].num_open >= 8
        os.kill(lost[0]._process.pid, signal.SIGKILL)

    assert outputs(driven, kill) == expected
    assert [link.is_lost for link in pool_of(driven)._links].count(True) == 1 and lost[0].is_lost
    check_and_close(driven)


def test_a_worker_is_started_for_one_that_was_killed(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "RESTART_SECONDS", 0.0)
    driven = build(2)
    stats = driven.engine.stats
    assert outputs(driven, lambda: os.kill(busiest(pool_of(driven))._process.pid, signal.SIGKILL)) == expected  # type: ignore[attr-defined]
    assert outputs(driven) == expected
    assert (stats.grammar_workers, stats.grammar_workers_lost) == (2, 1)
    assert all(not link.is_lost and link.num_posts for link in pool_of(driven)._links)
    check_and_close(driven)


def test_workers_that_are_stopped_cost_no_request(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    driven = build(2)

    def stop() -> None:
        monkeypatch.setattr(link_module, "ANSWER_SECONDS", 0.05)
        for link in pool_of(driven)._links:
            stop_process(link._process.pid)  # type: ignore[attr-defined]

    assert outputs(driven, stop) == expected
    assert any(link.is_lost for link in pool_of(driven)._links)
    check_and_close(driven)


def test_aborted_requests_give_their_slots_back() -> None:
    driven = build(2)
    outputs(driven)
    open_ids = [driven.submit([7, 8, row], SamplingParams(100), constraint=WALKED["words"]) for row in range(ROWS)]
    while busiest(pool_of(driven)).num_open < 2:
        driven.engine.tick()
    driven.mailbox.inbox.append((CLIENT, Abort(open_ids)))
    driven.run()
    check_and_close(driven)
