"""Child processes of the frontend, with or without supervision.

Each can be started, stopped and, if it should stay up, started again after an exit.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem.protocol.errors import ExitCode

logger = logging.getLogger(__name__)

FIRST_BACKOFF = 0.5
"""Seconds between the first exit of a supervised process and its restart; doubled for each exit that follows."""
LAST_BACKOFF = 10.0
"""Longest pause before a restart, in seconds."""
STEADY_SECONDS = 30.0
"""Seconds of uptime after which the pauses start over with `FIRST_BACKOFF`."""
MAX_FAILED_STARTS = 3
"""Exits in a row with one exit status, each before the program was ready, after which it is not started again."""

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables that no child process gets: only this process asks the hub."""
_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """Wrap a command so that its process is killed when this one ends.

    That works on Linux; elsewhere the command is returned unchanged.
    """
    if not sys.platform.startswith("linux"):
        return list(argv)
    return [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *argv]


def without_hub_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a child process may have."""
    return {name: text for name, text in environment.items() if name not in HUB_TOKENS}


class ManagedProcess:
    """Child process that runs one program.

    `start` and `stop` it, or `supervise` it with restarts. The program runs in a session of its own, so that an
    interrupt from the terminal reaches only this process, which then stops its children in order. It does not outlive
    the thread that started it (`die_with_parent`).
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        pipe_limit: int | None = None,
        stderr_limit: int | None = None,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Describe the process without starting it.

        `name` stands in logs and errors. With a `pipe_limit`, in bytes a line, stdin and stdout are pipes to this
        process; with a `stderr_limit`, stderr is. `on_exit` is called after each exit of a supervised process.
        """
        self.name = name
        self.restarts = 0
        """Number of times that `supervise` has started the program again."""
        self.was_ready = False
        """True once the program has been ready since its last start, as its owner found out (`mark_ready`)."""
        self.failure = ""
        """What the program said of its failure since its last start, if its owner heard of it; "" otherwise."""
        self._argv = argv
        self._pass_fds = pass_fds
        self._environment = environment
        self._pipe_limit = pipe_limit
        self._stderr_limit = stderr_limit
        self._on_exit = on_exit
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Id of the running process; None before the start and after an exit."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def exit_status(self) -> str:
        """Description of the last exit, such as "exit code 2"; "" before the first.

        A process that was killed has one such as "signal SIGKILL".
        """
        if self._process is None or self._process.returncode is None:
            return ""
        return _describe(self._process.returncode)

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """Pipe to the running process; needs a `pipe_limit`."""
        assert self._process is not None and self._process.stdin is not None, f"the {self.name} has no pipe to write to"
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Pipe from the running process; needs a `pipe_limit`."""
        assert self._process is not None and self._process.stdout is not None, f"the {self.name} has no pipe to read"
        return self._process.stdout

    @property
    def stderr(self) -> asyncio.StreamReader:
        """Pipe from the running process's stderr; needs a `stderr_limit`."""
        assert self._process is not None and self._process.stderr is not None, (
            f"the stderr of {self.name} was not piped"
        )
        return self._process.stderr

    def mark_ready(self) -> None:
        """Note that the program is ready: its next exit does not count as a failed start."""
        if not self.was_ready:
            self.was_ready = True
            logger.debug("the %s, process %s, is ready", self.name, self.pid)

    async def start(self) -> None:
        """Start the program. Raises OSError if it cannot be executed."""
        pipe = None if self._pipe_limit is None else PIPE
        environment = os.environ if self._environment is None else self._environment
        self._process = await asyncio.create_subprocess_exec(
            *die_with_parent(self._argv),
            stdin=pipe,
            stdout=pipe,
            stderr=None if self._stderr_limit is None else PIPE,
            limit=self._pipe_limit or self._stderr_limit or 2**16,
            pass_fds=self._pass_fds,
            start_new_session=True,
            env=without_hub_tokens(environment),
        )
        if self._stopping.is_set():  # stopped while it was being started
            self._kill()

    async def wait(self) -> int:
        """Wait for the exit of a started process; return its code, negative for a signal."""
        assert self._process is not None, f"the {self.name} was not started"
        return await self._process.wait()

    async def stop(self, timeout: float) -> None:
        """End the process for good.

        Terminate it, and kill it if it still runs after `timeout` seconds.
        """
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
            self._kill()
            await process.wait()

    def kill(self) -> None:
        """Kill the process for good."""
        self._stopping.set()
        self._kill()

    def restart(self) -> None:
        """Kill a supervised process so that `supervise` starts it again.

        Do nothing once it is being stopped.
        """
        if not self._stopping.is_set():
            self._kill()

    async def supervise(self, first_backoff: float = FIRST_BACKOFF, last_backoff: float = LAST_BACKOFF) -> ExitCode:
        """Run the program again after each exit until it is stopped.

        Returns OK after `stop` or `kill`, CONFIG as soon as the program reports that its settings cannot work, FATAL
        once MAX_FAILED_STARTS starts in a row have failed the same way. Pauses between an exit and the restart grow
        from `first_backoff` to `last_backoff` seconds.
        """
        backoff = first_backoff
        failed_starts: list[int] = []
        while not self._stopping.is_set():
            started = time.monotonic()
            self.was_ready, self.failure = False, ""
            await self.start()
            logger.debug("started the %s, process %s", self.name, self.pid)
            code = await self.wait()
            self._on_exit()
            if self._stopping.is_set():
                break
            if code == ExitCode.CONFIG:
                # At the first start its own message is the last one, and says it all.
                level = logging.ERROR if self.restarts else logging.DEBUG
                logger.log(level, "the %s cannot run with these settings; see its message above", self.name)
                return ExitCode.CONFIG
            failed_starts = [] if self.was_ready else [*(c for c in failed_starts if c == code), code]
            if len(failed_starts) == MAX_FAILED_STARTS:
                logger.error(
                    "the %s failed to start %d times in a row with %s%s; see its messages above",
                    self.name, MAX_FAILED_STARTS, _describe(code), f": {self.failure}" if self.failure else "",
                )  # fmt: skip
                return ExitCode.FATAL
            if time.monotonic() - started > STEADY_SECONDS:
                backoff = first_backoff
            logger.error("the %s ended with %s; restarting it in %.1f s", self.name, _describe(code), backoff)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(2 * backoff, last_backoff)
            self.restarts += not self._stopping.is_set()
        return ExitCode.OK

    def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
