"""Coroutines run for callers without an event loop."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from tandem.frontend.offline.loop_thread import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    running = LoopThread("test-loop")
    running.start()
    yield running
    running.stop()
    assert "test-loop" not in [one.name for one in threading.enumerate()]


def test_run_returns_the_result_or_raises_the_error(thread: LoopThread) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        assert thread.is_current
        return 2 * number

    async def fail() -> None:
        raise ValueError("no")

    assert thread.run(double(21)) == 42
    with pytest.raises(ValueError, match="no"):
        thread.run(fail())
    assert not thread.is_current


def test_iterate_runs_a_generator_and_closes_it(thread: LoopThread) -> None:
    ended: list[int] = []

    async def count(end: int) -> AsyncIterator[int]:
        try:
            for number in range(end):
                assert thread.is_current
                yield number
            raise ValueError("no more")
        finally:
            ended.append(end)

    numbers = thread.iterate(count(3))
    assert [next(numbers), next(numbers), next(numbers)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(numbers)
    abandoned = thread.iterate(count(5))
    assert next(abandoned) == 0
    del abandoned
    assert ended == [3, 5]


def test_an_interrupt_cancels_the_coroutine_and_waits(thread: LoopThread) -> None:
    ended: list[str] = []

    async def endless() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("ended")

    with pytest.raises(KeyboardInterrupt):
        thread.run(endless())
    assert ended == ["ended"]
