"""A TCP proxy that can fall silent: connections stay open, and nothing comes through any more."""

import asyncio
import contextlib
import socket
import threading
from types import TracebackType

from tests.support.serving import free_port

PIECE = 65_536


class SilentProxy:
    """Forwards a number of adjacent ports to as many others, in a thread of its own."""

    def __init__(self, target: int, ports: int = 2) -> None:
        """`target` is the first of the ports to forward to, on the loopback."""
        self.port = free_ports(ports)
        """First port that it listens on."""
        self._target = target
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._open: asyncio.Event | None = None
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="silent-proxy")

    def __enter__(self) -> "SilentProxy":
        self._thread.start()
        assert self._started.wait(30), "the proxy could not listen"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def silence(self) -> None:
        """Let nothing through in either direction, as where a cable was pulled."""
        assert self._open is not None
        self._loop.call_soon_threadsafe(self._open.clear)

    def resume(self) -> None:
        """Let everything through again, what has waited first."""
        assert self._open is not None
        self._loop.call_soon_threadsafe(self._open.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._open, self._stop = asyncio.Event(), asyncio.Event()
        self._open.set()
        tasks: set[asyncio.Task[None]] = set()
        for offset in range(self._ports):
            server = await self._listen(self.port + offset, self._target + offset, tasks)
            tasks.add(asyncio.create_task(server.serve_forever()))
        self._started.set()
        await self._stop.wait()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, port: int, target: int, tasks: set[asyncio.Task[None]]) -> asyncio.Server:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, back = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            for pair in ((reader, back), (there, writer)):
                tasks.add(asyncio.create_task(self._forward(*pair)))

        return await asyncio.start_server(connect, "127.0.0.1", port)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._open is not None
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(PIECE):
                    await self._open.wait()
                    writer.write(data)
                    await writer.drain()
                await self._open.wait()
        finally:
            writer.close()


def free_ports(count: int) -> int:
    """Return the first of this many adjacent free ports."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
