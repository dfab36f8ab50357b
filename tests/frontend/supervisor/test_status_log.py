"""Lines on loading and throughput, from heartbeats under a clock of the test's own."""

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.supervisor.status_log import LOADING_SECONDS, THROUGHPUT_SECONDS, StatusLog
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in


class Engine:
    """A watched engine whose heartbeats the test sends."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.watch = EngineWatch(1e6, 1e6, self.clock)
        self.log = StatusLog(self.watch, self.clock)

    def beat(
        self, phase: Phase, seconds: float, epoch: int = 1, percent: int = 0, detail: str = "", **stats: Any
    ) -> None:
        """Let time pass, then send a heartbeat and tick."""
        self.clock.advance(seconds)
        self.watch.observe(Heartbeat(epoch, phase, percent, detail, 0, EngineStats(**stats)))
        self.log.tick()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_loading_is_reported_at_intervals(lines: Callable[[], list[str]]) -> None:
    engine = Engine()
    engine.log.tick()
    for percent in range(0, 100, 10):
        engine.beat(Phase.LOADING, LOADING_SECONDS / 4, percent=percent)
    assert [numbers_in(line) for line in lines()] == [[30], [70]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_one_line_on_a_terminal_that_is_redrawn_and_removed(lines: Callable[[], list[str]]) -> None:
    engine, terminal = Engine(), Terminal()
    engine.log = StatusLog(engine.watch, engine.clock, terminal)
    engine.beat(Phase.STARTING, 0.1)
    assert terminal.getvalue() == ""
    engine.beat(Phase.LOADING, 0.1, percent=50, detail="7.5 of 15.00 GiB, 30.10 GiB/s")
    half = f"       loading [{'#' * 15}{'.' * 15}]  50 %  7.5 of 15.00 GiB, 30.10 GiB/s"
    assert terminal.getvalue() == f"\r{half}\r"
    engine.beat(Phase.LOADING, LOADING_SECONDS, percent=99, detail="14.9 of 15.00 GiB")
    shown = terminal.getvalue()
    assert shown.endswith(f"]  99 %  14.9 of 15.00 GiB{' ' * 12}\r")
    engine.beat(Phase.LOADING, 0.1, percent=100, detail="15.00 of 15.00 GiB")
    removed = f"{shown}\r{' ' * len(half)}\r"
    assert terminal.getvalue() == removed, "the engine may log a line of its own now"
    engine.beat(Phase.WARMING, 0.1)
    engine.beat(Phase.WARMING, 0.1)
    assert terminal.getvalue() == removed
    assert [numbers_in(line) for line in lines()] == [[100, 15, 15]]


def test_loading_that_stands_still_is_reported_once(lines: Callable[[], list[str]]) -> None:
    engine = Engine()
    for percent in (0, 0, 0, 1):
        engine.beat(Phase.LOADING, LOADING_SECONDS, percent=percent)
    assert [numbers_in(line) for line in lines()] == [[0], [1]]


def test_throughput_is_that_of_the_interval(lines: Callable[[], list[str]]) -> None:
    engine = Engine()
    engine.beat(Phase.READY, 0, prompt_tokens=1000, generation_tokens=5000)
    engine.beat(Phase.READY, THROUGHPUT_SECONDS / 2, prompt_tokens=1500, generation_tokens=9000, running=3)
    assert lines() == []
    engine.beat(
        Phase.READY, THROUGHPUT_SECONDS / 2, prompt_tokens=2000, generation_tokens=17345, running=3, waiting=2,
        pages_used=25, pages_total=200, prefix_queries=1000, prefix_hits=640,
    )  # fmt: skip
    assert lines() == [
        "prompt 100.0 tokens/s, generation 1,234.5 tokens/s, running 3, waiting 2, KV cache usage 12.5 %, "
        "prefix cache hit rate 64 %"
    ]


def test_nothing_is_logged_of_an_idle_engine(lines: Callable[[], list[str]]) -> None:
    engine = Engine()
    for _ in range(3):
        engine.beat(Phase.READY, THROUGHPUT_SECONDS, generation_tokens=7, prompt_tokens=7)
    assert lines() == []
    engine.beat(Phase.READY, THROUGHPUT_SECONDS, generation_tokens=7, prompt_tokens=7, waiting=1)
    assert lines() == ["prompt 0.0 tokens/s, generation 0.0 tokens/s, running 0, waiting 1, KV cache usage 0.0 %"], (
        "work that makes no progress is shown"
    )


def test_a_restarted_engine_starts_a_new_interval(lines: Callable[[], list[str]]) -> None:
    engine = Engine()
    engine.beat(Phase.READY, 0, generation_tokens=90_000)
    engine.beat(Phase.READY, THROUGHPUT_SECONDS, epoch=2, generation_tokens=10)
    assert lines() == []
    engine.beat(Phase.DRAINING, THROUGHPUT_SECONDS, epoch=2, generation_tokens=20)
    engine.beat(Phase.READY, THROUGHPUT_SECONDS, epoch=2, generation_tokens=30)
    assert lines() == []
