"""Client of one compiler process, which is started on demand and replaced after a failure."""

import asyncio
import contextlib
import logging
import sys

import msgspec
from msgspec import Struct

from tandem.frontend.errors import overloaded
from tandem.frontend.process import ManagedProcess, bare_environment, describe_exit
from tandem.protocol.params import MAX_GRAMMAR_CHARS

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""Wall-clock limit of one compilation, in seconds; on an idle machine the CPU limit is reached first."""
_REMEDY = "to compile; make it smaller or simpler"
OUT_OF_MEMORY = f"it takes more than 2 GiB of memory {_REMEDY}"
OUT_OF_STACK = f"it takes more than 2 MiB of stack {_REMEDY}"
_REASONS = {"signal SIGSEGV": OUT_OF_STACK, "signal SIGBUS": OUT_OF_STACK}
"""Error by the exit status of a process that exceeded a limit; any other status means the memory limit."""
_ARGV = (sys.executable, "-P", "-m", "tandem.frontend.grammar.worker")


class Checked(Struct, frozen=True):
    """Result of a compilation."""

    error: str | None
    """Compiler error; None if the grammar compiles."""
    seconds: float = 0.0
    """CPU time in seconds; 0 if the compilation ended its process."""
    is_limit: bool = False
    """True if the grammar exceeds a limit on time, memory or stack."""


class SlowGrammarError(Exception):
    """A grammar exceeds the CPU budget of its lane."""


def too_slow(cpu_seconds: float) -> str:
    """Return the error message of a grammar that exceeds the largest CPU budget."""
    return f"it takes more than {cpu_seconds:g} s of CPU time {_REMEDY}"


class GrammarProcess:
    """Run `tandem.frontend.grammar.worker`, starting it at the first request.

    `hello` is the first line sent to the process.
    """

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._process: ManagedProcess | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that wait for killed processes to end."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(self, grammar: str, cpu_seconds: float) -> Checked:
        """Compile a grammar.

        If the process or its child ends, the grammar has exceeded a limit, which the error names. Supports one request
        at a time. Raises SlowGrammarError after `cpu_seconds` of CPU time, and ApiError 429 after `CHECK_SECONDS` or if
        the process was killed.
        """
        process = self._process
        if process is None or process.pid is None:
            if process is not None:
                logger.error("the process that compiles grammars ended with %s", process.exit_status)
            self._end()
            process = await self._start()
        answer = b""
        try:
            process.stdin.write(msgspec.json.encode([grammar, cpu_seconds]) + b"\n")
            async with asyncio.timeout(CHECK_SECONDS):
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                answer = await process.stdout.readline()
                if not answer:
                    await process.wait()
        except TimeoutError:
            raise overloaded(
                f"the machine is too busy to compile a grammar within {CHECK_SECONDS:g} s; try again later"
            ) from None
        finally:
            # The next request must not read this answer.
            if not answer:
                self._end()
        if answer:
            ending, error, seconds = msgspec.json.decode(answer, type=tuple[int | None, str | None, float])
            if ending is None:
                return Checked(error, seconds)
            status = describe_exit(ending)
        else:
            status = process.exit_status
        if status == "signal SIGPROF":
            raise SlowGrammarError
        if status in ("signal SIGKILL", "signal SIGTERM"):
            logger.error("the process that compiles grammars ended with %s while it compiled one", status)
            raise overloaded(f"the process that compiled the grammar ended with {status}; try again later")
        return Checked(_REASONS.get(status, OUT_OF_MEMORY), is_limit=True)

    async def close(self) -> None:
        """Kill the process and wait until every killed one has ended."""
        self._end()
        await asyncio.gather(*self._ending)

    async def _start(self) -> ManagedProcess:
        process = ManagedProcess(
            "grammar compiler", _ARGV, environment=bare_environment(), pipe_limit=2 * MAX_GRAMMAR_CHARS
        )
        await process.start()
        process.stdin.write(self._hello + b"\n")
        self._process = process
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            ended = asyncio.create_task(_ended(process))
            self._ending.add(ended)
            ended.add_done_callback(self._ending.discard)


async def _ended(process: ManagedProcess) -> None:
    await process.wait()
    await process.wait_for_pipes()
