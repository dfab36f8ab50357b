"""Start, end and supervision of child processes."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.frontend.process import ManagedProcess
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
        child = process(f"open({str(log)!r}, 'a').write('x')", on_exit=lambda: exits.append(len(log.read_text())))
        supervised = asyncio.create_task(child.supervise(0.01, 0.02))
        while child.restarts < 2:
            await asyncio.sleep(0.01)
        await child.stop(5)
        assert await supervised is ExitCode.OK
        assert exits[:2] == [1, 2]

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
