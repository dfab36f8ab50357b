"""Threads for work that would block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class Workers:
    """Thread pool.

    A function that holds the GIL still blocks the event loop.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        """Run a function in a thread; return its result or raise its exception."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Cancel work that has not started; do not wait for the rest."""
        self._pool.shutdown(wait=False, cancel_futures=True)
