"""Engine core of a supervisor: started again when it ends, killed when it hangs."""

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
    """Keeper of the engine core's process, which judges it by its heartbeats."""

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
        """Describe the engine without starting it.

        level_file: file of a log level that its process follows; the process has it among its flags.
        """
        self.watch = watch
        self.endpoint = endpoint
        self.restarts = {"exit": 0, "hang": 0}
        """Number of times that `supervise` has started the program again, by why it had ended."""
        self.totals = EngineTotals()
        """Statistics of the engine over all its lives."""
        self._process = process
        self._transport = transport
        self._hang_timeout = hang_timeout
        self._policy = policy
        self._status_log = status_log
        self._level_file = level_file
        self._was_ready = False
        """True once the running process was ready."""
        self._was_hung = False
        """True once the running process was killed because it hung."""
        self._failure = ""
        """What the running process said of its failure."""
        self._is_stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Id of the running process; None while there is none."""
        return self._process.pid

    async def supervise(self) -> ExitCode:
        """Run the program again after each exit until it is stopped.

        Returns OK after `stop` or `kill`, and another code if the program cannot be started (`RestartPolicy`).
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
        """Follow the heartbeats until cancelled.

        The ops port and the restart of a hung engine depend on it.
        """
        with zmq.asyncio.Context() as context:
            subscriber = connect_heartbeat(context, heartbeat_endpoint(self.endpoint), self._transport)
            await EngineMonitor(self.watch, self.observe, self.check).run(subscriber)

    def observe(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat, and what it says of the start of the process."""
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
        """Kill the process if it hangs, and log what it does.

        It is then started again.
        """
        # Once it is being stopped, the timeout of the stop ends a process that hangs.
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
        """Have the process log from this level, also when it is started again."""
        if self._level_file is None:
            return
        unnamed = self._level_file.with_suffix(".new")
        try:
            unnamed.write_text(level)
            unnamed.replace(self._level_file)  # the process reads the old level or the new one
        except OSError as error:
            logger.error(
                "the %s keeps its log level: %s cannot be written (%s)",
                self._process.name, self._level_file, error.strerror,
            )  # fmt: skip

    async def stop(self, timeout: float) -> None:
        """End the process for good; kill it if it still runs after `timeout` seconds."""
        self._is_stopping.set()
        await self._process.stop(timeout)

    def kill(self) -> None:
        """Kill the process for good."""
        self._is_stopping.set()
        self._process.kill()
