"""Event loop in a thread, for callers without one."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_END = object()


class LoopThread:
    """Daemon thread with an event loop.

    It runs coroutines for other threads.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """True in the loop's thread, which must not wait for itself in `run`."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and wait for its result.

        KeyboardInterrupt cancels the coroutine, and is raised once it has finished.
        """
        future: Future[_Result] = Future()
        tasks: list[asyncio.Task[_Result]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(partial(_hand_over, future))

        def end() -> None:
            if tasks:
                tasks[0].cancel()
            else:
                coroutine.close()
                future.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
            return future.result()
        except KeyboardInterrupt:
            # `begin`, if it was scheduled, runs before this.
            self._loop.call_soon_threadsafe(end)
            wait([future])
            raise

    def iterate(self, source: AsyncIterator[_Result]) -> Iterator[_Result]:
        """Iterate over an asynchronous generator, running it in the loop.

        The generator is closed with this iterator.

        """
        try:
            while (item := self.run(_next(source))) is not _END:
                yield item
        finally:
            self._close(source)

    def _close(self, source: AsyncIterator[Any]) -> None:
        closing = _aclose(source)
        try:
            if self.is_current:  # the garbage collector runs in whichever thread allocates
                self._loop.create_task(closing)
            elif self._loop.is_running():
                self.run(closing)
        finally:
            if self._loop.is_closed():
                closing.close()

    def stop(self) -> None:
        """Stop the loop and the thread, dropping the tasks that still run."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source, _END)


async def _aclose(source: AsyncIterator[Any]) -> None:
    if isinstance(source, AsyncGenerator):
        await source.aclose()


def _hand_over(future: "Future[_Result]", task: "asyncio.Task[_Result]") -> None:
    if task.cancelled():
        future.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
