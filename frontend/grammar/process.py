"""A process that compiles grammars, seen from this side: asked one at a time, ended and started again at need."""

import asyncio
import contextlib
import sys

import msgspec

from tandem.frontend.errors import unavailable
from tandem.protocol.errors import ErrorCode

MAX_GRAMMAR_CHARS = 2**20
CHECK_SECONDS = 10.0
"""On the clock. The process has a limit of its own on CPU time, which ends it sooner unless the machine is busy."""
TOO_COMPLEX = "it takes too much time, memory or depth to compile; make it smaller or simpler"
_ARGV = (sys.executable, "-P", "-m", "tandem.frontend.grammar.worker")


class GrammarProcess:
    """Runs `grammar_worker`, from the first question on. `hello` is the line that it gets first."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._process: asyncio.subprocess.Process | None = None
        self._ending: set[asyncio.Task[int]] = set()
        """Processes that were killed and are not gone yet."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(self, grammar: str) -> str | None:
        """What is wrong with a grammar, or None; what the process does not survive, it cannot compile.

        Raises ApiError 503 where it takes too long on the clock. One question at a time.
        """
        process = self._process
        if process is None or process.returncode is not None:
            self._end()
            process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        try:
            process.stdin.write(msgspec.json.encode([grammar]) + b"\n")
            async with asyncio.timeout(CHECK_SECONDS):
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise unavailable(
                "the machine is too busy to compile a grammar; try again later", ErrorCode.OVERLOADED
            ) from None
        finally:
            # Whoever asks next must not get this answer.
            if not answer:
                self._end()
        return TOO_COMPLEX if not answer else msgspec.json.decode(answer, type=tuple[str | None])[0]

    async def close(self) -> None:
        self._end()
        await asyncio.gather(*self._ending)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # A session of its own: an interrupt from the terminal is not meant for it.
        process = await asyncio.create_subprocess_exec(
            *_ARGV, stdin=pipe, stdout=pipe, limit=2 * MAX_GRAMMAR_CHARS, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(self._hello + b"\n")
        self._process = process
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            gone = asyncio.create_task(process.wait())
            self._ending.add(gone)
            gone.add_done_callback(self._ending.discard)
