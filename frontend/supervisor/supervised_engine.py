"""Engine core process, restarted when it exits and killed when it hangs."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import zmq.asyncio

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import EngineTotals
from tandem.frontend.engine.monitor import EngineMonitor
from tandem.frontend.process import ManagedProcess
from tandem.frontend.supervisor.restart_policy import Exit, RestartPolicy
from tandem.frontend.supervisor.status_log import StatusLog
from tandem.protocol.errors import ExitCode
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.logs import LogLevel
from tandem.protocol.sockets import Transport, connect_heartbeat, heartbeat_endpoint

logger = logging.getLogger(__name__)


class SupervisedEngine:
    """Manager of the engine core's process, based on its heartbeats."""

    def __init__(
        self,
        process: ManagedProcess,
        watch: EngineWatch,
        endpoint: str,
        transport: Transport,
        hang_timeout: float,
        policy: RestartPolicy,
        status_log: StatusLog,
        level_file: Path | None = None,
    ) -> None:
        """Initialize without starting the engine.

        level_file: file with the log level that the process watches; it is among the process's flags.
        """
        self.watch = watch
        self.endpoint = endpoint
        self.restarts = {"exit": 0, "hang": 0}
        """Number of restarts, by why the previous process exited."""
        self.totals = EngineTotals()
        """Totals of the engine's statistics over all its processes."""
        self._process = process
        self._transport = transport
        self._hang_timeout = hang_timeout
        self._policy = policy
        self._status_log = status_log
        self._level_file = level_file
        self._was_ready = False
        """True once the running process was ready."""
        self._was_hung = False
        """True once the running process was killed for hanging."""
        self._failure = ""
        """Failure reported by the running process."""
        self._is_stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return self._process.pid

    async def supervise(self) -> ExitCode:
        """Run the program, restarting it after each exit, until it is stopped.

        Returns OK after `stop` or `kill`, or another code if the program cannot be started (`RestartPolicy`).
        """
        while not self._is_stopping.is_set():
            self._was_ready, self._was_hung, self._failure = False, False, ""
            started = time.monotonic()
            await self._process.start()
            logger.debug("started the %s, process %s", self._process.name, self._process.pid)
            code = await self._process.wait()
            self.watch.forget()
            if self._is_stopping.is_set():
                break
            ended = Exit(code, self._was_ready, time.monotonic() - started, self._failure)
            verdict = self._policy.after(ended, f"the {self._process.name}")
            logger.log(logging.ERROR if verdict.level == "error" else logging.DEBUG, "%s", verdict.line)
            if verdict.restart_after is None:
                return verdict.exit_code
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), verdict.restart_after)
            self.restarts["hang" if self._was_hung else "exit"] += not self._is_stopping.is_set()
        return ExitCode.OK

    async def monitor(self) -> None:
        """Receive heartbeats until cancelled.

        The ops port and the detection of hangs depend on it.
        """
        with zmq.asyncio.Context() as context:
            subscriber = connect_heartbeat(context, heartbeat_endpoint(self.endpoint), self._transport)
            await EngineMonitor(self.watch, self.observe, self.check).run(subscriber)

    def observe(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat, and the progress of the start that it reports."""
        self.totals.observe(heartbeat)
        self.watch.observe(heartbeat)
        if self.watch.heartbeat is not heartbeat:
            return
        if heartbeat.phase is Phase.READY:
            if not self._was_ready:
                logger.debug("the %s, process %s, is ready", self._process.name, self._process.pid)
            self._was_ready = True
            self._policy.mark_ready()
        elif heartbeat.phase is Phase.FAILED:
            self._failure = heartbeat.detail

    def check(self) -> None:
        """Kill the process if it hangs, and log its activity.

        It is then restarted.
        """
        # During a stop, the stop timeout applies to a hung process.
        if self._is_stopping.is_set():
            return
        if self._process.pid is not None and (reason := self.watch.should_restart(self._hang_timeout)):
            logger.error("the %s, process %d, is killed: %s", self._process.name, self._process.pid, reason)
            self._was_hung = True
            self._process.kill_to_restart()
        if self.watch.is_silent:
            self.watch.note_loss()
        self._status_log.tick()

    def set_log_level(self, level: LogLevel) -> None:
        """Set the log level of the process, also after restarts."""
        if self._level_file is None:
            return
        unnamed = self._level_file.with_suffix(".new")
        try:
            unnamed.write_text(level)
            unnamed.replace(self._level_file)  # atomic: the process reads either level
        except OSError as error:
            logger.error(
                "the %s keeps its log level: %s cannot be written (%s)",
                self._process.name,
                self._level_file,
                error.strerror,
            )

    async def stop(self, timeout: float) -> None:
        """Stop the process for good; kill it if it runs longer than `timeout` seconds."""
        self._is_stopping.set()
        await self._process.stop(timeout)

    def kill(self) -> None:
        """Kill the process for good."""
        self._is_stopping.set()
        self._process.kill()
