"""Client of one process that compiles grammars.

The process is started on demand and replaced after a failure.
"""

import asyncio
import contextlib
import sys

import msgspec

from tandem.frontend.errors import overloaded
from tandem.frontend.process import ManagedProcess
from tandem.protocol.params import MAX_GRAMMAR_CHARS

CHECK_SECONDS = 10.0
"""Wall-clock limit of one compilation in seconds; on an idle machine, the limit on CPU time ends the process sooner."""
TOO_COMPLEX = "it takes too much time, memory or depth to compile; make it smaller or simpler"
_ARGV = (sys.executable, "-P", "-m", "tandem.frontend.grammar.worker")


class GrammarProcess:
    """Run `tandem.frontend.grammar.worker` from the first request on.

    `hello` is the first line sent to the process.
    """

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._process: ManagedProcess | None = None
        self._ending: set[asyncio.Task[int]] = set()
        """Waits for processes that were killed and have not ended yet."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(self, grammar: str) -> str | None:
        """Compile a grammar; return the error, or None if it compiles.

        A grammar that ends the process counts as too complex. Raises ApiError 429 after `CHECK_SECONDS`. One request
        at a time.
        """
        process = self._process
        if process is None or process.pid is None:
            self._end()
            process = await self._start()
        answer = b""
        try:
            process.stdin.write(msgspec.json.encode([grammar]) + b"\n")
            async with asyncio.timeout(CHECK_SECONDS):
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise overloaded("the machine is too busy to compile a grammar; try again later") from None
        finally:
            # The next request must not read this answer.
            if not answer:
                self._end()
        return TOO_COMPLEX if not answer else msgspec.json.decode(answer, type=tuple[str | None])[0]

    async def close(self) -> None:
        """Kill the process and wait until every killed one has ended."""
        self._end()
        await asyncio.gather(*self._ending)

    async def _start(self) -> ManagedProcess:
        process = ManagedProcess("grammar compiler", _ARGV, pipe_limit=2 * MAX_GRAMMAR_CHARS)
        await process.start()
        process.stdin.write(self._hello + b"\n")
        self._process = process
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            ended = asyncio.create_task(process.wait())
            self._ending.add(ended)
            ended.add_done_callback(self._ending.discard)
