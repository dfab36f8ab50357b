"""Engine process of offline inference, and the errors it prints to stderr."""

import asyncio
import re
import sys
from collections import deque
from collections.abc import Sequence
from typing import get_args

from tandem.frontend.offline.result import EngineError
from tandem.frontend.process import ManagedProcess, describe_exit
from tandem.frontend.supervisor.launch import engine_command
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ExitCode
from tandem.protocol.logs import LogLevel

_STOP_SECONDS = 10.0
"""Seconds for the engine to exit before it is killed."""
_TAIL_SECONDS = 1.0
"""Seconds to read the remaining output of an exited process; its children may keep stderr open."""
_MAX_LINE_BYTES = 2**16
_MAX_LINES = 64
"""Number of last lines that are searched for the reason of an exit; a refusal has fewer."""
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d[ T]")
_NAME = re.compile(r"^(\S+Z engine ERROR|tandem engine:|python -m tandem\.engine_core: error:) ")


class EngineProcess:
    """Engine process of a session.

    Its stderr is forwarded to this process's stderr.
    """

    def __init__(self, endpoint: str, options: EngineOptions, log_level: LogLevel, flags: Sequence[str] = ()) -> None:
        """Start nothing yet. flags: further ones of the engine."""
        command = [*engine_command(endpoint, options, flags), f"--log-level={log_level}"]
        self._process = ManagedProcess("engine core", command, stderr_limit=_MAX_LINE_BYTES)
        self._last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def start(self) -> None:
        await self._process.start()
        self._reader = asyncio.create_task(self._pass_on())

    async def stop(self) -> None:
        """Stop the process and forward its remaining output."""
        await self._process.stop(_STOP_SECONDS)
        await self._read_rest()

    async def check(self) -> None:
        """Raise EngineError with the reason if the process has exited."""
        if not (status := self._process.exit_status):
            return
        await self._read_rest()
        # Only a logged error gives the reason, and a killed process has not logged one.
        relevant = [line for line in self._last_lines if _NAME.match(line) or not _LOG_LINE.match(line)]
        lines = [line for line in relevant if line.strip()]
        first = len(lines) - 1
        if status == describe_exit(
            ExitCode.CONFIG
        ):  # a refusal may have several lines; a traceback has its message last
            first = min((index for index, line in enumerate(lines) if _NAME.match(line)), default=first)
        reason = "".join(_NAME.sub("", line) for line in lines[first:]).strip()
        detail = f": {reason}" if lines and "SIGKILL" not in status else ""
        raise EngineError(f"the engine core ended with {status}{detail}")

    async def _read_rest(self) -> None:
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=_TAIL_SECONDS)
            self._reader.cancel()

    async def _pass_on(self) -> None:
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # longer than the limit and dropped by the reader
                continue
            if not line:
                return
            text = line.decode(errors="replace")
            self._last_lines.append(text)
            sys.stderr.write(text)
            sys.stderr.flush()


def check_log_level(level: str) -> LogLevel:
    """Parse a log level. Raises ValueError if it is unknown."""
    levels: tuple[LogLevel, ...] = get_args(LogLevel)
    for known in levels:
        if level == known:
            return known
    raise ValueError(f"log_level must be one of {', '.join(levels)}, not {level!r}")
