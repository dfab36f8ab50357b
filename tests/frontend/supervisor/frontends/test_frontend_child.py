"""Program of a frontend as a process: its flags, its messages, its end."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tandem.frontend.control_channel import Accept, Beat, Drain, FromFrontend, Leaving
from tandem.frontend.flags.arguments import child_argv
from tandem.frontend.supervisor.frontends.frontend_child import FrontendChild
from tandem.protocol.errors import ExitCode
from tests.frontend.conftest import DEADLINE

PROGRAM = """
import json, socket, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
names = [socket.socket(fileno=int(fd)).getsockname()[1] for fd in flags["--listener-fds"].split(",")]
channel = socket.socket(fileno=int(flags["--supervisor-fd"]))
def say(message):
    channel.sendall(json.dumps(message).encode() + b"\\n")
say({"type": "beat", "status": "serving", "slots": [int(flags["--slot"])], "connections": names[1]})
for line in channel.makefile():
    message = json.loads(line)
    if message["type"] == "accept":
        say({"type": "leaving"})
    if message["type"] == "drain":
        sys.exit(3)
"""


class Life:
    """A child, the messages that it has sent, and its exit code."""

    def __init__(self, *command: str) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.messages: asyncio.Queue[FromFrontend] = asyncio.Queue()
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._command = command
        self._fds = [sock.fileno() for sock in self.listeners]
        self.child = FrontendChild(
            1, self._line, self._fds, dict(os.environ), self.messages.put_nowait, self.code.set_result
        )

    def _line(self, slot: int, supervisor_fd: int) -> list[str]:
        return [*self._command, *child_argv(slot, [[fd] for fd in self._fds], supervisor_fd)]

    def close(self) -> None:
        for sock in self.listeners:
            sock.close()


def run(check: Callable[[Life], Coroutine[Any, Any, None]], *command: str) -> None:
    async def body() -> None:
        life = Life(*command)
        try:
            await check(life)
        finally:
            life.close()

    asyncio.run(asyncio.wait_for(body(), DEADLINE))


def test_child_inherits_all_sockets_and_talks_over_its_channel() -> None:
    async def check(life: Life) -> None:
        life.child.send(Accept((0, 1)))  # before the process runs
        life.child.start()
        port = life.listeners[1].getsockname()[1]
        assert await life.messages.get() == Beat("serving", (1,), connections=port)
        assert await life.messages.get() == Leaving()
        assert life.child.pid is not None
        life.child.send(Drain(0.0, 1.0))
        assert await life.code == 3
        assert life.child.pid is None
        life.child.send(Accept(()))  # to a channel that has ended

    run(check, sys.executable, "-c", PROGRAM)


def test_killed_child_ends_by_the_signal() -> None:
    async def check(life: Life) -> None:
        life.child.start()
        await life.messages.get()
        life.child.kill()
        assert await life.code == -signal.SIGKILL

    run(check, sys.executable, "-c", PROGRAM)


def test_child_that_is_killed_before_it_runs_ends_without_a_message() -> None:
    async def check(life: Life) -> None:
        life.child.start()
        life.child.kill()
        await life.code
        assert life.messages.empty()

    run(check, sys.executable, "-c", PROGRAM)


def test_child_that_cannot_be_executed_ends_with_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError("too many processes")

    async def check(life: Life) -> None:
        life.child.start()
        assert await life.code == ExitCode.FATAL

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    run(check, sys.executable)
    assert any("frontend-1" in line and "too many processes" in line for line in caplog.messages)
