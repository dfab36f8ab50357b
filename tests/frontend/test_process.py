"""Start, end and supervision of child processes."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.frontend.process import HUB_TOKENS, MAX_FAILED_STARTS, ManagedProcess
from tandem.protocol.errors import ExitCode

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)
ECHO = "import sys; print(sys.stdin.readline().strip() + '!', flush=True); sys.stdin.read()"


def process(program: str, **options: Any) -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", program], **options)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


@pytest.mark.parametrize(
    ("program", "status"), [("raise SystemExit(3)", "exit code 3"), ("import os; os.abort()", "signal SIGABRT")]
)
def test_exit_status_describes_the_exit(program: str, status: str) -> None:
    async def body() -> None:
        child = process(program)
        assert (child.pid, child.exit_status) == (None, "")
        await child.start()
        assert child.pid is not None
        await child.wait()
        assert (child.pid, child.exit_status) == (None, status)

    run(body())


def test_pipes_connect_stdin_and_stdout() -> None:
    async def body() -> None:
        child = process(ECHO, pipe_limit=100)
        await child.start()
        child.stdin.write(b"hello\n")
        assert await child.stdout.readline() == b"hello!\n"
        child.kill()
        assert await child.wait() == -9

    run(body())


@pytest.mark.parametrize("own_environment", [False, True])
def test_child_process_does_not_get_the_hubs_token(own_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        for name in HUB_TOKENS:
            monkeypatch.setenv(name, "hf_secret")
        monkeypatch.setenv("OTHER", "kept")
        environment = dict(os.environ) if own_environment else None
        child = process("import os; print(dict(os.environ))", pipe_limit=2**16, environment=environment)
        await child.start()
        printed = (await child.stdout.readline()).decode()
        await child.wait()
        assert "'OTHER': 'kept'" in printed
        assert "hf_secret" not in printed

    run(body())


def test_stop_kills_a_process_that_ignores_the_signal() -> None:
    async def body() -> None:
        child = process(IGNORES_SIGTERM, pipe_limit=100)
        await child.start()
        assert await child.stdout.readline() == b"up\n"
        await child.stop(0.05)
        assert child.exit_status == "signal SIGKILL"
        await child.stop(0.05)

    run(body())


def test_supervise_restarts_after_each_exit_until_stopped(tmp_path: Path) -> None:
    async def body() -> None:
        log = tmp_path / "starts"
        exits: list[int] = []

        def on_exit() -> None:
            exits.append(len(log.read_text()))
            child.was_ready = True

        child = process(f"open({str(log)!r}, 'a').write('x')", on_exit=on_exit)
        supervised = asyncio.create_task(child.supervise(0.01, 0.02))
        while child.restarts < MAX_FAILED_STARTS + 1:
            await asyncio.sleep(0.01)
        await child.stop(5)
        assert await supervised is ExitCode.OK
        assert exits[: MAX_FAILED_STARTS + 1] == [1, 2, 3, 4]

    run(body())


FAILING = """
import pathlib, sys
log = pathlib.Path({log!r})
starts = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (starts + 1))
sys.exit({codes}[starts])
"""


@pytest.mark.parametrize("codes", [[7, 7, 7], [7, 7, 8, 7, 8, 8, 8]], ids=str)
def test_a_child_that_fails_to_start_three_times_the_same_way_is_given_up(
    codes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        log = tmp_path / "starts"
        child = process(FAILING.format(log=str(log), codes=codes))
        assert await child.supervise(0.01, 0.02) is ExitCode.FATAL
        assert len(log.read_text()) == len(codes)
        assert child.restarts == len(codes) - 1
        assert f"failed to start 3 times in a row with exit code {codes[-1]};" in caplog.text

    run(body())


def test_an_exit_after_the_child_was_ready_is_no_failed_start(tmp_path: Path) -> None:
    async def body() -> None:
        log, codes = tmp_path / "starts", [7, 7, 7, 7, 7]

        def on_exit() -> None:
            child.was_ready = len(log.read_text()) == 2

        child = process(FAILING.format(log=str(log), codes=codes), on_exit=on_exit)
        assert await child.supervise(0.01, 0.02) is ExitCode.FATAL
        assert len(log.read_text()) == 5

    run(body())


def test_restart_is_ignored_once_the_process_is_being_stopped() -> None:
    async def body() -> None:
        child = process(IGNORES_SIGTERM, pipe_limit=100)
        await child.start()
        await child.stdout.readline()
        pid = child.pid
        assert pid is not None
        stopping = asyncio.create_task(child.stop(0.3))
        await asyncio.sleep(0)
        child.restart()
        await asyncio.sleep(0.05)
        assert psutil.pid_exists(pid) and child.pid == pid
        await stopping
        assert child.restarts == 0

    run(body())
