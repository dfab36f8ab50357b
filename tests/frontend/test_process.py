"""Start and end of child processes."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import psutil
import pytest

from tandem.frontend.process import HUB_TOKENS, ManagedProcess

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)
ECHO = "import sys; print(sys.stdin.readline().strip() + '!', flush=True); sys.stdin.read()"


def process(program: str, **options: Any) -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", program], **options)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 120))


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


def test_a_worker_writes_to_the_log_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tandem.frontend.process")
    program = "import sys; print('Traceback', 'x' * 200_000, file=sys.stderr); sys.exit('a part of a request')"

    async def body() -> None:
        worker = process(program, pipe_limit=1000)
        await worker.start()
        await worker.wait()
        async with asyncio.timeout(120):
            while "a part of a request" not in caplog.text:
                await asyncio.sleep(0.01)

    run(body())
    assert {record.levelname for record in caplog.records if record.name == "tandem.frontend.process"} == {"DEBUG"}


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


def test_a_kill_to_restart_is_ignored_once_the_process_is_being_stopped() -> None:
    async def body() -> None:
        child = process(IGNORES_SIGTERM, pipe_limit=100)
        await child.start()
        await child.stdout.readline()
        pid = child.pid
        assert pid is not None
        stopping = asyncio.create_task(child.stop(30))
        await asyncio.sleep(0)
        child.kill_to_restart()
        await asyncio.sleep(0.05)
        assert psutil.pid_exists(pid) and child.pid == pid
        os.kill(pid, signal.SIGKILL)
        await stopping

    run(body())
