"""Frontends that are replaced one after another while clients send requests, under a supervisor that is the test."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tandem.frontend.control_channel import Accept, Beat, Drain, Leaving, SupervisorEnd, supervisor_end
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_tokenizer
from tests.support.closed_loop import run_clients

ROOT = Path(__file__).parents[2]
GUARD_SECONDS = 120.0


def listeners(number: int) -> list[socket.socket]:
    """Listen several times on one port."""
    made: list[socket.socket] = []
    for _ in range(number):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(made[0].getsockname() if made else ("127.0.0.1", 0))
        sock.listen(1024)
        made.append(sock)
    return made


class Frontend:
    """One frontend process and the test's end of its control channel."""

    def __init__(self, process: Process, channel: SupervisorEnd) -> None:
        self.process = process
        self.channel = channel

    @classmethod
    async def start(cls, endpoint: str, folder: Path, slot: int, sockets: list[socket.socket]) -> "Frontend":
        ours, theirs = socket.socketpair()
        fds = [sock.fileno() for sock in sockets]
        command = [sys.executable, "-m", "tandem.frontend", "--endpoint", endpoint, "--model-dir", str(folder)]
        command += ["--slot", str(slot), "--listener-fds", ",".join(map(str, fds))]
        command += ["--supervisor-fd", str(theirs.fileno()), "--store", "off", "--log-level", "warning"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=[*fds, theirs.fileno()], env=environment, cwd=ROOT
        )
        theirs.close()
        return cls(process, await supervisor_end(ours))

    async def until_serving(self, slot: int) -> None:
        while True:
            message = await self.channel.receive()
            assert message is not None, "the frontend has ended"
            if isinstance(message, Beat) and message.status == "serving":
                assert message.slots == (slot,)
                return

    async def replace(self, slot: int, endpoint: str, folder: Path, sockets: list[socket.socket]) -> "Frontend":
        """Do what a supervisor does when a frontend got a signal."""
        self.process.send_signal(signal.SIGTERM)
        while not isinstance(message := await self.channel.receive(), Leaving):
            assert message is not None, "the frontend has ended"
        self.channel.send(Accept((slot,)))
        successor = await Frontend.start(endpoint, folder, slot, sockets)
        await successor.until_serving(slot)
        self.channel.send(Drain(0.0, GUARD_SECONDS))
        while await self.channel.receive() is not None:
            pass
        assert await self.process.wait() == 0
        self.channel.close()
        return successor

    async def kill(self) -> None:
        self.channel.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def roll(endpoint: str, folder: Path) -> None:
    sockets = listeners(2)
    async with AsyncExitStack() as stack:
        for sock in sockets:
            stack.callback(sock.close)
        running = [await Frontend.start(endpoint, folder, slot, sockets) for slot in range(len(sockets))]
        stack.push_async_callback(lambda: asyncio.gather(*[frontend.kill() for frontend in running]))
        for slot, frontend in enumerate(running):
            await frontend.until_serving(slot)

        async def replace_all() -> None:
            for slot, frontend in enumerate(running):
                running[slot] = await frontend.replace(slot, endpoint, folder, sockets)

        clients, problems = await run_clients(sockets[0].getsockname(), replace_all)
    assert problems == []
    assert min(client.num_answered for client in clients) > 1
    kept = [client for client in clients if client.num_connections < client.num_answered]
    assert kept, "connections were kept"


@pytest.mark.slow
def test_frontends_replaced_one_after_another_lose_and_refuse_no_request(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with tempfile.TemporaryDirectory(prefix="tdm-") as private:
        endpoint = f"ipc://{private}/engine"
        engine = FakeEngine(endpoint).start()
        engine.step_seconds = 0.002
        try:
            asyncio.run(roll(endpoint, tmp_path))
        finally:
            engine.die()
