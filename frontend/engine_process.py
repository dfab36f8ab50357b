"""An engine core that serves this process alone and is started once."""

import asyncio
import contextlib
import sys

from tandem.frontend.supervisor.process import tied
from tandem.protocol.engine_options import EngineOptions, engine_argv

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
