"""Pools of compiler processes with a common CPU budget, shared fairly between clients."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tandem.frontend.errors import overloaded
from tandem.frontend.grammar.process import Checked
from tandem.protocol.fair_queue import FairQueue


class Compiler(Protocol):
    """Process that compiles one grammar at a time."""

    async def ask(self, grammar: str, cpu_seconds: float) -> Checked:
        """Compile a grammar."""

    async def close(self) -> None:
        """End the process."""


class Lane:
    """Pool of processes that compile grammars, each within `cpu_seconds` of CPU time.

    A free process goes to the client that has used the least CPU time. Idle processes form a stack (LIFO), so that only
    as many start as are needed.
    """

    def __init__(self, name: str, processes: Sequence[Compiler], cpu_seconds: float, wait_seconds: float) -> None:
        self._name = name
        self._idle = list(processes)
        self._cpu_seconds = cpu_seconds
        self._wait_seconds = wait_seconds
        self._queue: FairQueue[asyncio.Future[Compiler]] = FairQueue()

    async def compile(self, client: str, grammar: str) -> Checked:
        """Compile a grammar for a client.

        Raises the exceptions of `Compiler.ask`, and ApiError 429 if all processes stay busy for `wait_seconds`.
        """
        loop = asyncio.get_running_loop()
        process = await self._acquire(client)
        # Charge in advance, so that a client with several grammars does not take all processes at once.
        self._queue.charge(client, self._cpu_seconds)
        began = loop.time()
        try:
            return await process.ask(grammar, self._cpu_seconds)
        finally:
            seconds = loop.time() - began
            self._queue.charge(client, seconds - self._cpu_seconds)
            self._queue.expect(client, seconds)
            self._release(process)

    async def close(self) -> None:
        """End the processes; none may be in use."""
        await asyncio.gather(*(process.close() for process in self._idle))

    async def _acquire(self, client: str) -> Compiler:
        if self._idle:  # no grammar is waiting
            return self._idle.pop()
        free: asyncio.Future[Compiler] = asyncio.get_running_loop().create_future()
        self._queue.add(client, free)
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await asyncio.shield(free)
        except TimeoutError:
            self._give_up(free)
            raise overloaded(
                f"the grammar has waited {self._wait_seconds:g} s for other {self._name}grammars to be compiled, "
                "the longest wait; try again later"
            ) from None
        except asyncio.CancelledError:
            self._give_up(free)
            raise

    def _give_up(self, free: "asyncio.Future[Compiler]") -> None:
        if free.done() and not free.cancelled():
            self._release(free.result())
        free.cancel()

    def _release(self, process: Compiler) -> None:
        while (waiting := self._queue.take()) is not None:
            if not waiting[1].done():
                waiting[1].set_result(process)
                return
        self._idle.append(process)
