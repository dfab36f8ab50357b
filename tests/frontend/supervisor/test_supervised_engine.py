"""Restarts of the engine's process, with programs and heartbeats of the test's own."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.process import ManagedProcess
from tandem.frontend.supervisor.restart_policy import RestartPolicy
from tandem.frontend.supervisor.status_log import StatusLog
from tandem.frontend.supervisor.supervised_engine import SupervisedEngine
from tandem.protocol.errors import ExitCode
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.sockets import Transport
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.frontend.conftest import DEADLINE
from tests.support.refusals import numbers_in

COUNTED = """
import pathlib, sys, time
log = pathlib.Path({log!r})
starts = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (starts + 1))
if {codes}[starts] is None:
    time.sleep(600)
sys.exit({codes}[starts])
"""
"""Program whose n-th start ends with the n-th code, or runs on."""


class Engine:
    """An engine whose process is the program, under a clock of the test's own."""

    def __init__(self, log: Path, *codes: int | None) -> None:
        self.log = log
        self.clock = FakeClock()
        self.watch = EngineWatch(5.0, 60.0, self.clock)
        program = COUNTED.format(log=str(log), codes=list(codes))
        self.process = ManagedProcess("engine core", [sys.executable, "-c", program])
        self.engine = SupervisedEngine(
            self.process, self.watch, "ipc:///nowhere", Transport(), 8.0, RestartPolicy(0.01, 0.02),
            StatusLog(self.watch, self.clock),
        )  # fmt: skip

    def sends(self, phase: Phase, detail: str = "") -> None:
        self.engine.observe(Heartbeat(self.starts, phase, 100, detail, 0, EngineStats()))

    @property
    def starts(self) -> int:
        return len(self.log.read_text()) if self.log.exists() else 0

    async def until_started(self, starts: int) -> None:
        while self.starts < starts or self.process.pid is None:
            await asyncio.sleep(0.01)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, DEADLINE))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "starts"


def test_an_engine_that_was_never_ready_is_given_up(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        engine = Engine(log, 7, 7, 7)
        assert await engine.engine.supervise() is ExitCode.FATAL
        assert (engine.starts, engine.engine.restarts) == (3, {"exit": 2, "hang": 0})

    run(body())
    assert any(numbers_in(line) == [3, 7] for line in caplog.messages)


def test_an_engine_that_was_ready_is_restarted_whatever_its_exits_say(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        engine = Engine(log, None, 2, 7, 7, 7, None)
        supervised = asyncio.create_task(engine.engine.supervise())
        await engine.until_started(1)
        engine.sends(Phase.READY)
        engine.process.kill_to_restart()
        await engine.until_started(6)
        assert engine.engine.restarts == {"exit": 5, "hang": 0}
        engine.engine.kill()
        assert await supervised is ExitCode.OK

    run(body())
    assert caplog.text.count("(exit code 2") == 1


def test_a_silent_engine_is_killed_after_the_hang_timeout_and_started_again(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        engine = Engine(log, None, None)
        supervised = asyncio.create_task(engine.engine.supervise())
        await engine.until_started(1)
        engine.sends(Phase.READY)
        engine.clock.advance(8.0)
        engine.engine.check()
        assert "is killed" not in caplog.text
        engine.clock.advance(0.5)
        engine.engine.check()
        await engine.until_started(2)
        assert engine.engine.restarts == {"exit": 0, "hang": 1}
        await engine.engine.stop(DEADLINE)
        assert await supervised is ExitCode.OK

    run(body())
    assert "8.5 s" in caplog.text


def test_an_engine_that_is_being_stopped_is_not_killed_for_its_silence(log: Path) -> None:
    async def body() -> None:
        engine = Engine(log, None)
        supervised = asyncio.create_task(engine.engine.supervise())
        await engine.until_started(1)
        engine.sends(Phase.READY)
        stop = asyncio.create_task(engine.engine.stop(DEADLINE))
        await asyncio.sleep(0)
        engine.clock.advance(100.0)
        engine.engine.check()
        await stop
        assert await supervised is ExitCode.OK
        assert engine.process.exit_status == "signal SIGTERM"

    run(body())
