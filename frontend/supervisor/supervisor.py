"""Keeps an engine core and an HTTP process running, serves the ops port, and ends them in order."""

import asyncio
import http.client
import json
import logging
import signal
import socket
import ssl
import time
from typing import Any, Literal

from tandem.frontend.engine.monitor import EngineMonitor
from tandem.frontend.supervisor.ops import QuietServer
from tandem.frontend.supervisor.process import Child

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25


async def guard_engine(engine: Child, monitor: EngineMonitor) -> None:
    """Kills the engine's process whenever its beats say that it is hung, or have long stopped. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    expected = loop.time()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        now = loop.time()
        if now - expected > TICK_SECONDS + 1.0:
            monitor.reset_timers()
        expected = now
        if engine.pid is not None and (reason := monitor.should_restart()):
            logger.error("the %s, process %d, is killed: %s", engine.name, engine.pid, reason)
            engine.restart()


ENGINE_STOP_SECONDS = 10.0
EXTRA_STOP_SECONDS = 5.0
"""What a frontend gets on top of its drain timeout before it is killed."""

_FORCED = 130


class Supervisor:
    """Restarts each dead child alone; a child that cannot run with its settings ends everything.

    The first SIGTERM or SIGINT stops the frontend, which drains, then the engine. The second kills both.
    """

    def __init__(
        self,
        engine: Child,
        frontend: Child | None,
        http_socket: socket.socket | None,
        monitor: EngineMonitor,
        ops: QuietServer,
        ops_socket: socket.socket,
        drain_timeout: float,
        scheme: Literal["http", "https"] = "http",
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._http_socket = http_socket
        self._monitor = monitor
        self._ops = ops
        self._ops_socket = ops_socket
        self._drain_timeout = drain_timeout
        self._scheme = scheme
        self._stop = asyncio.Event()
        self._forced = False
        self._started = time.monotonic()

    async def run(self) -> int:
        """Runs until a signal or a child's refusal; returns the exit code."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.signalled)
        ops = asyncio.create_task(self._ops.serve(sockets=[self._ops_socket]))
        background = [asyncio.create_task(self._monitor.listen()), asyncio.create_task(self._announce())]
        guard = asyncio.create_task(guard_engine(self._engine, self._monitor))
        for task in (ops, guard, *background):
            task.add_done_callback(_report)
        children = [self._engine] + ([self._frontend] if self._frontend else [])
        keepers = [asyncio.create_task(child.keep()) for child in children]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
            guard.cancel()  # from here on the stop timeout is what ends it
            await self._stop_children()
            codes = await asyncio.gather(*keepers)
        finally:
            for child in children:
                child.kill()
            await self._end(ops, [*background, guard, stop, *keepers])
        return _FORCED if self._forced else max(codes)

    def signalled(self) -> None:
        """The first time ends in order, the second time at once."""
        if self._stop.is_set():
            self._forced = True
            for child in (self._frontend, self._engine):
                if child is not None:
                    child.kill()
        self._stop.set()

    async def _stop_children(self) -> None:
        if self._frontend is not None:
            await self._frontend.stop(self._drain_timeout + EXTRA_STOP_SECONDS)
        await self._engine.stop(ENGINE_STOP_SECONDS)

    async def _end(self, ops: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """The ops port goes last, so that the end can be watched."""
        self._ops.should_exit = True
        await asyncio.wait([ops], timeout=2.0)
        for task in (ops, *tasks):
            task.cancel()
        await asyncio.gather(ops, *tasks, return_exceptions=True)

    async def _announce(self) -> None:
        """Says once that requests are taken, and of which model."""
        host, port = self._ops_socket.getsockname()[:2]
        print(f"engine metrics on http://{_display(host)}:{port}/metrics", flush=True)
        await self._monitor.until_ready()
        if self._http_socket is None:
            print(f"the engine is ready ({self._seconds()})", flush=True)
            return
        host, port = self._http_socket.getsockname()[:2]
        facts = await _until_serving(self._scheme, _reachable(host), port)
        print(
            f"tandem is ready on {self._scheme}://{_display(host)}:{port} "
            f"(model {facts.get('model')}, {facts.get('device')}, "
            f"{facts.get('kv_tokens')} KV tokens, {self._seconds()})",
            flush=True,
        )

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._started:.1f} s"


def _report(task: asyncio.Task[None]) -> None:
    """Without its ears or its ops port a supervisor goes on, but not in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of the supervisor failed: %r", error)


def _display(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reachable(host: str) -> str:
    """Where this host reaches a socket that listens on every address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def _until_serving(scheme: str, host: str, port: int) -> dict[str, Any]:
    """Asks the frontend until it is ready; returns what it says of the engine."""
    while True:
        facts = await asyncio.to_thread(_ask_ready, scheme, host, port)
        if facts is not None:
            return facts
        await asyncio.sleep(0.1)


def _ask_ready(scheme: str, host: str, port: int) -> dict[str, Any] | None:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    if scheme == "https":
        # Its own child, on its own socket: there is nobody else to be taken for it.
        connection = http.client.HTTPSConnection(host, port, timeout=2, context=ssl._create_unverified_context())
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
