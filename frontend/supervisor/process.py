"""A process that is kept alive: started, watched, started again, stopped."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem.protocol.engine_options import EngineOptions, engine_argv
from tandem.protocol.errors import ExitCode

logger = logging.getLogger(__name__)

FIRST_BACKOFF = 0.5
LAST_BACKOFF = 10.0
STEADY_SECONDS = 30.0
"""A process that ran for so long starts over with the first backoff."""

_TIE = Path(__file__).with_name("die_with_parent.py")


def tied(argv: Sequence[str]) -> list[str]:
    """A command that does not outlive this process, even if that is killed. Linux alone."""
    if not sys.platform.startswith("linux"):
        return list(argv)
    return [sys.executable, "-I", "-S", str(_TIE), str(os.getpid()), *argv]


class Child:
    """Keeps one program running, with growing pauses between its starts, until it is told to stop.

    The program gets a session of its own: an interrupt from the terminal reaches the supervisor alone, which then
    stops its children in order.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        pass_fds: Sequence[int] = (),
        on_exit: Callable[[], None] = lambda: None,
        backoff: float = FIRST_BACKOFF,
        last_backoff: float = LAST_BACKOFF,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._argv = argv
        self._pass_fds = pass_fds
        self._on_exit = on_exit
        self._first_backoff = backoff
        self._last_backoff = last_backoff
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def keep(self) -> ExitCode:
        """Runs until `stop` (OK), or until the program says that its settings cannot work (CONFIG)."""
        backoff = self._first_backoff
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run_once()
            self._on_exit()
            if self._stopping.is_set():
                break
            if code == ExitCode.CONFIG:
                logger.error(
                    "the %s cannot run with these settings (exit code %d); its reason is above", self.name, code
                )
                return ExitCode.CONFIG
            if time.monotonic() - started > STEADY_SECONDS:
                backoff = self._first_backoff
            logger.error("the %s ended with %s; starting it again in %.1f s", self.name, _describe(code), backoff)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(2 * backoff, self._last_backoff)
            self.restarts += not self._stopping.is_set()
        return ExitCode.OK

    async def stop(self, timeout: float) -> None:
        """Asks the program to end, and kills it after `timeout` seconds."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            logger.warning("the %s did not end within %.0f s and is killed", self.name, timeout)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Ends it at once, for good."""
        self._stopping.set()
        self.restart()

    def restart(self) -> None:
        """Kills the running process, if there is one; `keep` starts the next."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run_once(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *tied(self._argv), pass_fds=self._pass_fds, start_new_session=True, env=self._environment
        )
        if self._stopping.is_set():  # stopped while it was being started
            self.kill()
        logger.info("started the %s, process %d", self.name, self._process.pid)
        return await self._process.wait()


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


STOP_SECONDS = 10.0


class EngineError(Exception):
    """The engine core could not be started, or has ended."""


class EngineProcess:
    """A child of the thread that starts it: it ends with that thread and with this process, however they end."""

    def __init__(self, endpoint: str, options: EngineOptions) -> None:
        self._argv = [sys.executable, "-P", "-m", "tandem.engine_core", "--endpoint", endpoint, *engine_argv(options)]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        # In a session of its own an interrupt from the terminal does not reach it.
        self._process = await asyncio.create_subprocess_exec(*tied(self._argv), start_new_session=True)

    def check(self) -> None:
        """Raises EngineError where it does not run."""
        if self._process is None:
            raise EngineError("the engine core was not started")
        if (code := self._process.returncode) is not None:
            raise EngineError(f"the engine core ended with exit code {code}; its reason is on stderr")

    async def stop(self) -> None:
        """Asks it to end, and kills it where it does not."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
