"""Supervisor of an engine core and an HTTP process.

It keeps them running, serves the ops port, and ends them in order.
"""

import asyncio
import http.client
import json
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Literal

import zmq.asyncio

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.monitor import EngineMonitor
from tandem.frontend.listening import url_of
from tandem.frontend.process import ManagedProcess
from tandem.frontend.supervisor.ops import QuietServer
from tandem.frontend.supervisor.status_log import StatusLog
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.sockets import Transport, connect_heartbeat, heartbeat_endpoint

logger = logging.getLogger(__name__)

ENGINE_STOP_SECONDS = 10.0
EXTRA_STOP_SECONDS = 5.0
"""Seconds that a frontend gets in addition to its drain timeout before it is killed."""

REPEATED_SIGNAL_SECONDS = 0.5
"""Seconds after the first signal within which another one changes nothing."""
_READY_POLL_SECONDS = 0.05
_ALIVE_POLL_SECONDS = 0.25
_FORCED = 130


class Supervisor:
    """Supervisor that restarts each process that ends.

    It stops all if one cannot run with its settings, or fails to start the same way again and again. The first SIGTERM
    or SIGINT stops the frontend, which drains, then the engine. The second kills both.
    """

    def __init__(
        self,
        engine: ManagedProcess,
        frontend: ManagedProcess | None,
        http_socket: socket.socket | None,
        watch: EngineWatch,
        endpoint: str,
        transport: Transport,
        ops: QuietServer,
        ops_socket: socket.socket,
        drain_timeout: float,
        scheme: Literal["http", "https"] = "http",
        commit: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._http_socket = http_socket
        self._watch = watch
        self._endpoint = endpoint
        self._transport = transport
        self._ops = ops
        self._ops_socket = ops_socket
        self._drain_timeout = drain_timeout
        self._scheme = scheme
        self._commit = f"commit {commit}, " if commit else ""
        """Commit of a model of the hub, as it stands in the line that announces the server."""
        self._clock = clock
        self._status_log = StatusLog(watch, clock)
        self._signaled_at = 0.0
        self._stop = asyncio.Event()
        self._ending = False
        self._forced = False
        self._started = clock()

    async def run(self) -> int:
        """Run until a signal and return the exit code.

        A process that cannot run with its settings, or fails to start again and again, ends the run as well.
        """
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.handle_signal)
        ops = asyncio.create_task(self._ops.serve(sockets=[self._ops_socket]))
        monitors = (self._monitor_engine(), self._monitor_frontend(), self._announce())
        background = [asyncio.create_task(monitor) for monitor in monitors]
        for task in (ops, *background):
            task.add_done_callback(_report)
        processes = [self._engine] + ([self._frontend] if self._frontend else [])
        supervised = [asyncio.create_task(process.supervise()) for process in processes]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stop, *supervised], return_when=asyncio.FIRST_COMPLETED)
            await self._stop_processes()
            codes = await asyncio.gather(*supervised)
        finally:
            for process in processes:
                process.kill()
            await self._end(ops, [*background, stop, *supervised])
        return _FORCED if self._forced else max(codes)

    def handle_signal(self) -> None:
        """Stop in order at the first signal, kill at the second.

        Programs such as coreutils' `timeout` send one signal twice, to the process and to its group: a second one that
        follows at once counts as the first.
        """
        now = self._clock()
        if not self._stop.is_set():
            self._signaled_at = now
            self._log_drain()
        elif now - self._signaled_at > REPEATED_SIGNAL_SECONDS:
            self._forced = True
            for process in (self._frontend, self._engine):
                if process is not None:
                    process.kill()
        self._stop.set()

    async def _monitor_engine(self) -> None:
        """Follow the engine's heartbeat until cancelled.

        The ops port and the watchdog depend on it.
        """
        with zmq.asyncio.Context() as context:
            subscriber = connect_heartbeat(context, heartbeat_endpoint(self._endpoint), self._transport)
            await EngineMonitor(self._watch, self._observe, self._tick).run(subscriber)

    def _observe(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat, and what it says of the start of the engine's process."""
        self._watch.observe(heartbeat)
        if self._watch.heartbeat is not heartbeat:
            return
        if heartbeat.phase is Phase.READY:
            self._engine.mark_ready()
        elif heartbeat.phase is Phase.FAILED:
            self._engine.failure = heartbeat.detail

    async def _monitor_frontend(self) -> None:
        """Ask each new process of the frontend for its health until it answers."""
        if self._frontend is None or self._http_socket is None:
            return
        host, port = self._http_socket.getsockname()[:2]
        while not self._ending:
            if (pid := self._frontend.pid) is not None and not self._frontend.was_ready:
                alive = await asyncio.to_thread(_ask, self._scheme, _reachable(host), port, "/health/live")
                if alive is not None and self._frontend.pid == pid:
                    self._frontend.mark_ready()
            await asyncio.sleep(_ALIVE_POLL_SECONDS)

    def _tick(self) -> None:
        self._watchdog()
        if not self._ending:
            self._status_log.tick()

    def _watchdog(self) -> None:
        """Restart the engine's process if it hangs or is silent for too long.

        Do nothing while it is being stopped.
        """
        if self._engine.pid is not None and not self._ending and (reason := self._watch.should_restart()):
            logger.error("the %s, process %d, is killed: %s", self._engine.name, self._engine.pid, reason)
            self._engine.restart()

    def _log_drain(self) -> None:
        """Say what the stop waits for, and how to cut it short."""
        heartbeat = self._watch.heartbeat
        open_requests = heartbeat.stats.running + heartbeat.stats.waiting if heartbeat is not None else 0
        if self._frontend is not None and open_requests:
            logger.info(
                "stopping: waiting up to %.10g s for %d sequences in progress; interrupt again to stop at once",
                self._drain_timeout, open_requests,
            )  # fmt: skip
        else:
            logger.info("stopping")

    async def _stop_processes(self) -> None:
        # From here on the stop timeouts end a process that hangs, not the watchdog.
        self._ending = True
        if self._frontend is not None:
            await self._frontend.stop(self._drain_timeout + EXTRA_STOP_SECONDS)
        await self._engine.stop(ENGINE_STOP_SECONDS)

    async def _end(self, ops: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """Stop the ops port, which served until the processes had ended, and the tasks."""
        self._ops.should_exit = True
        await asyncio.wait([ops], timeout=2.0)
        for task in (ops, *tasks):
            task.cancel()
        await asyncio.gather(ops, *tasks, return_exceptions=True)

    async def _announce(self) -> None:
        """Print where the server listens.

        The ops address comes first, once the engine has accepted its settings; then, once requests are accepted, the
        address and the model.
        """
        while (heartbeat := self._watch.heartbeat) is None or heartbeat.phase in (Phase.STARTING, Phase.FAILED):
            await asyncio.sleep(_READY_POLL_SECONDS)
        print(f"engine metrics on {url_of(self._ops_socket)}/metrics, endpoint {self._endpoint}", flush=True)
        while not self._watch.health().ready:
            await asyncio.sleep(_READY_POLL_SECONDS)
        if self._http_socket is None:
            print(f"the engine is ready ({self._commit}{self._uptime()})", flush=True)
            return
        host, port = self._http_socket.getsockname()[:2]
        facts = await _until_serving(self._scheme, _reachable(host), port)
        print(
            f"tandem is ready on {url_of(self._http_socket, self._scheme)} "
            f"(model {facts.get('model')}, {self._commit}{facts.get('device')}, "
            f"{facts.get('kv_tokens')} KV tokens, {self._uptime()})",
            flush=True,
        )

    def _uptime(self) -> str:
        return f"{self._clock() - self._started:.1f} s"


def _report(task: asyncio.Task[None]) -> None:
    """Log the failure of a background task; the supervisor goes on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of the supervisor failed: %r", error)


def _reachable(host: str) -> str:
    """Return the address at which this host reaches a listening socket.

    The socket may listen on every address.
    """
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def _until_serving(scheme: str, host: str, port: int) -> dict[str, Any]:
    """Poll the frontend until it is ready.

    Return the facts about the engine that it answers.
    """
    while True:
        facts = await asyncio.to_thread(_ask, scheme, host, port, "/health/ready")
        if facts is not None:
            return facts
        await asyncio.sleep(0.1)


def _ask(scheme: str, host: str, port: int, path: str) -> dict[str, Any] | None:
    """Return the JSON of the frontend's answer to a GET.

    None unless it answers with 200.
    """
    connection = http.client.HTTPConnection(host, port, timeout=2)
    if scheme == "https":
        # The server is a child of this process on a socket of this process, so its identity needs no proof.
        connection = http.client.HTTPSConnection(host, port, timeout=2, context=ssl._create_unverified_context())
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
