"""Child processes, which do not outlive this process."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

FIRST_BACKOFF = 0.5
"""Seconds between the first exit of a supervised process and its restart; doubled for each further exit."""
LAST_BACKOFF = 10.0
"""Maximum seconds before a restart."""
STEADY_SECONDS = 30.0
"""Seconds of uptime after which the backoff is reset to `FIRST_BACKOFF`."""
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables hidden from child processes: only this process uses the hub."""
SERVICE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
"""Variables hidden from child processes: only this process notifies systemd."""
KEYS = ("TANDEM_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""Variables that only frontends get: API keys, and headers for the trace collector."""
_BARE_VARIABLES = (
    *("PATH", "HOME", "TMPDIR", "TZ", "TZDIR", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME"),
    *("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
)
_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """Wrap a command so that its process is killed when this one exits.

    Linux only; elsewhere the command is returned unchanged.
    """
    if not sys.platform.startswith("linux"):
        return list(argv)
    return [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *argv]


def child_environment(environment: Mapping[str, str], *, with_keys: bool = False) -> dict[str, str]:
    """Return the environment of a child process."""
    secret = {*HUB_TOKENS, *SERVICE_MANAGER, *(() if with_keys else KEYS)}
    return {name: text for name, text in environment.items() if name not in secret}


def bare_environment() -> dict[str, str]:
    """Return the environment of a child process that handles untrusted input.

    It contains no secrets.
    """
    return {name: text for name in _BARE_VARIABLES if (text := os.environ.get(name)) is not None}


class ManagedProcess:
    """Child process that runs one program.

    It may be restarted after an exit, until `stop` or `kill`. The program runs in its own session, so that an interrupt
    from the terminal reaches only this process, which then stops its children in order. It does not outlive the thread
    that started it (`die_with_parent`).
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
    ) -> None:
        """Initialize without starting the process.

        name: used in logs and errors. environment: by default this process's own without secrets. pipe_limit: maximum
        bytes of a line; with it stdin and stdout are pipes, and stderr, which may quote requests, is logged at debug
        level. stderr_limit: the same for stderr as a pipe.
        """
        self.name = name
        self._argv = argv
        self._pass_fds = pass_fds
        self._environment = environment
        self._pipe_limit = pipe_limit
        self._stderr_limit = stderr_limit
        self._process: Process | None = None
        self._log: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Process id; None before the start and after an exit."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def exit_status(self) -> str:
        """Description of the last exit, such as "exit code 2"; "" before the first.

        For a killed process, such as "signal SIGKILL".
        """
        if self._process is None or self._process.returncode is None:
            return ""
        return describe_exit(self._process.returncode)

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """Stdin of the process; needs a `pipe_limit`."""
        assert self._process is not None and self._process.stdin is not None, f"the {self.name} has no pipe to write to"
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Stdout of the process; needs a `pipe_limit`."""
        assert self._process is not None and self._process.stdout is not None, f"the {self.name} has no pipe to read"
        return self._process.stdout

    @property
    def stderr(self) -> asyncio.StreamReader:
        """Stderr of the process; needs a `stderr_limit`."""
        assert self._process is not None and self._process.stderr is not None, (
            f"the stderr of {self.name} was not piped"
        )
        return self._process.stderr

    async def start(self) -> None:
        """Start the program. Raises OSError if it cannot be executed."""
        pipe = None if self._pipe_limit is None else PIPE
        given = self._environment
        environment = child_environment(os.environ if given is None else given, with_keys=given is not None)
        self._process = await asyncio.create_subprocess_exec(
            *die_with_parent(self._argv),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe if self._stderr_limit is None else PIPE,
            limit=self._pipe_limit or self._stderr_limit or 2**16,
            pass_fds=self._pass_fds,
            start_new_session=True,
            env=environment,
        )
        if self._process.stderr is not None and self._stderr_limit is None:
            self._log = asyncio.create_task(self._log_stderr(self._process.stderr))
        if self._is_stopping:  # stopped during its start
            self._kill()

    async def _log_stderr(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
            except ValueError:  # longer than the limit and dropped by the reader
                continue
            if not line:
                return
            logger.debug("the %s: %s", self.name, line.decode(errors="replace").rstrip())

    async def wait(self) -> int:
        """Wait for the process to exit; return its code, negative for a signal."""
        assert self._process is not None, f"the {self.name} was not started"
        return await self._process.wait()

    async def wait_for_pipes(self) -> None:
        """Wait until an exited process's pipes are closed, also by its children."""
        await self.stdout.read()
        if self._log is not None:
            await self._log

    async def stop(self, timeout: float) -> None:
        """Stop the process for good.

        Terminate it, and kill it if it runs longer than `timeout` seconds.
        """
        self._is_stopping = True
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
        self._is_stopping = True
        self._kill()

    def kill_to_restart(self) -> None:
        """Kill the process, for its owner to restart.

        Does nothing during a stop.
        """
        if not self._is_stopping:
            self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def describe_exit(code: int) -> str:
    """Describe an exit code, such as "exit code 2".

    A negative code is a signal, such as "signal SIGKILL".
    """
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
