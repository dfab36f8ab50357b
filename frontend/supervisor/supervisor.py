"""Supervisor of an engine core and frontends.

It restarts them, serves the ops port, and stops them in order.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from tandem.frontend.supervisor.announcement import Announcement
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.ops import QuietServer, health
from tandem.frontend.supervisor.reload import Reloader
from tandem.frontend.supervisor.service_manager import ServiceManager
from tandem.frontend.supervisor.supervised_engine import SupervisedEngine

logger = logging.getLogger(__name__)

ENGINE_STOP_SECONDS = 3.0
"""Seconds for the engine to exit after the frontends have, before it is killed."""
END_SECONDS = 2.0
"""Seconds after the second signal for frontends to end open requests with an error, before all are killed."""
REPEATED_SIGNAL_SECONDS = 0.5
"""Seconds after a signal within which another one is ignored."""
_FORCED = 130


class StopTimes(Struct, frozen=True):
    """Timeouts of a graceful shutdown in seconds."""

    shutdown_delay: float
    """Seconds for which requests are still accepted while the service already reports unready."""
    drain_timeout: float
    """Seconds for open requests to finish."""


class Supervisor:
    """Supervisor that restarts each process that exits.

    It stops if a process cannot run with its settings, or repeatedly fails to start in the same way. The first SIGTERM
    or SIGINT drains the frontends, then stops the engine. The second ends open requests with an error, the third kills
    all.
    """

    def __init__(
        self,
        engine: SupervisedEngine | None,
        frontends: Frontends | None,
        listeners: Sequence[socket.socket],
        stop_times: StopTimes,
        announcement: Announcement,
        ops: QuietServer,
        ops_socket: socket.socket,
        manager: ServiceManager,
        reloader: Reloader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._frontends = frontends
        self._listeners = listeners
        self._stop_times = stop_times
        self._announcement = announcement
        self._ops = ops
        self._ops_socket = ops_socket
        self._manager = manager
        self._reloader = reloader
        self._clock = clock
        self._signaled_at = 0.0
        self._stop = asyncio.Event()
        self._is_forced = False

    async def run(self) -> int:
        """Run until a signal and return the exit code.

        It also returns if a process cannot run with its settings, or repeatedly fails to start.
        """
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.handle_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reloader.reload)
        ops = asyncio.create_task(self._ops.serve(sockets=[self._ops_socket]))
        background = [
            asyncio.create_task(self._announcement.run()),
            asyncio.create_task(self._manager.follow(self._status)),
        ]
        if self._engine is not None:
            background.append(asyncio.create_task(self._engine.monitor()))
        for task in (ops, *background):
            task.add_done_callback(_report)
        parts = [part for part in (self._frontends, self._engine) if part is not None]
        supervised = [asyncio.create_task(part.supervise()) for part in parts]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stop, *supervised], return_when=asyncio.FIRST_COMPLETED)
            await self._stop_processes()
            codes = await asyncio.gather(*supervised)
        finally:
            self._kill()
            await self._end(ops, [*background, stop, *supervised])
        return _FORCED if self._is_forced else max(codes)

    def handle_signal(self) -> None:
        """Shut down gracefully at the first signal, at once at the second, kill at the third.

        Programs such as coreutils' `timeout` send a signal twice, to the process and to its group, so a signal right
        after another is ignored.
        """
        now, is_first = self._clock(), not self._stop.is_set()
        if not is_first and now - self._signaled_at <= REPEATED_SIGNAL_SECONDS:
            logger.info(
                "a signal within %.10g s of the one before counts as the same, which some programs send twice; "
                "interrupt again if it was meant",
                REPEATED_SIGNAL_SECONDS,
            )
            return
        self._signaled_at = now
        if is_first:
            self._manager.stopping()
            self._log_drain()
        else:
            self._force()
        self._stop.set()

    def _force(self) -> None:
        """End open requests with an error, then kill what is left; the second time kill at once."""
        is_first, self._is_forced = not self._is_forced, True
        if is_first and self._frontends is not None and self._frontends.is_running:
            logger.warning("interrupted again: open requests end with an error; once more kills all processes")
            self._frontends.end()
            asyncio.get_running_loop().call_later(END_SECONDS, self._kill)
        else:
            if not is_first:
                logger.warning("interrupted again: all processes that are left are killed")
            self._kill()

    def _status(self) -> tuple[bool, str]:
        """Return whether the service is ready, and a description of its state."""
        body = health(self._engine.watch if self._engine is not None else None, self._frontends)
        state = "stopping" if self._stop.is_set() else str(body["status"])
        serving = f", {body['frontends_serving']} of {body['frontends']} frontends" if "frontends" in body else ""
        reason = f": {body['reason']}" if body["reason"] and not self._stop.is_set() else ""
        return body["status"] == "ready", f"{state}{serving}{reason}"

    def _log_drain(self) -> None:
        """Log what the shutdown waits for, and how to skip the wait."""
        open_sequences = 0
        if self._engine is not None and (heartbeat := self._engine.watch.heartbeat) is not None:
            open_sequences = heartbeat.stats.running + heartbeat.stats.waiting
        elif self._frontends is not None:
            open_sequences = self._frontends.open_sequences
        if self._frontends is not None and open_sequences:
            logger.info(
                "stopping: waiting up to %.10g s for %d sequences in progress; interrupt again to stop at once",
                self._stop_times.shutdown_delay + self._stop_times.drain_timeout,
                open_sequences,
            )
        else:
            logger.info("stopping")

    async def _stop_processes(self) -> None:
        """Drain all frontends at once, then stop the engine.

        This process closes its copies of the listening sockets first: once the frontends have closed theirs, clients
        are refused instead of waiting in vain.
        """
        for sock in self._listeners:
            sock.close()
        if self._frontends is not None:
            await self._frontends.stop(self._stop_times.shutdown_delay, self._stop_times.drain_timeout)
        if self._is_forced:
            self._kill()
        elif self._engine is not None:
            await self._engine.stop(ENGINE_STOP_SECONDS)

    def _kill(self) -> None:
        for part in (self._frontends, self._engine):
            if part is not None:
                part.kill()

    async def _end(self, ops: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """Stop the ops port, which serves until all processes have exited, and the tasks."""
        self._ops.should_exit = True
        await asyncio.wait([ops], timeout=2.0)
        for task in (ops, *tasks):
            task.cancel()
        await asyncio.gather(ops, *tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    """Log the failure of a background task; the supervisor continues without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of the supervisor failed: %r", error)
