"""Ticks of the writes of streams, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.frontend.api.write_ticks import CALLS_PER_TURN, WriteTicks
from tests.support.virtual_loop import VirtualLoop

INTERVAL = 0.01


def run(script: Callable[[WriteTicks], Awaitable[None]]) -> None:
    async def main() -> None:
        await script(WriteTicks(INTERVAL))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


def test_all_that_wait_are_called_at_one_tick_once_each() -> None:
    called: list[tuple[str, float]] = []

    async def script(ticks: WriteTicks) -> None:
        def first() -> None:
            called.append(("first", now()))

        ticks.await_next(first)
        ticks.await_next(first)
        await asyncio.sleep(0.007)
        ticks.await_next(lambda: called.append(("second", now())))
        await asyncio.sleep(1.0)

    run(script)
    assert called == [("first", INTERVAL), ("second", INTERVAL)]


def test_ticks_are_an_interval_apart_for_one_that_waits_again() -> None:
    times: list[float] = []

    async def script(ticks: WriteTicks) -> None:
        def again() -> None:
            times.append(now())
            if len(times) < 3:
                ticks.await_next(again)

        ticks.await_next(again)
        await asyncio.sleep(1.0)

    run(script)
    assert times == [0.01, 0.02, 0.03]


def test_a_call_that_is_forgotten_is_not_made() -> None:
    called: list[str] = []

    async def script(ticks: WriteTicks) -> None:
        def gone() -> None:
            called.append("gone")

        ticks.await_next(gone)
        ticks.await_next(lambda: called.append("stays"))
        ticks.forget(gone)
        ticks.forget(gone)
        await asyncio.sleep(1.0)

    run(script)
    assert called == ["stays"]


def test_other_work_has_its_turn_between_many_calls() -> None:
    order: list[str] = []

    async def script(ticks: WriteTicks) -> None:
        def first() -> None:
            asyncio.get_running_loop().call_soon(lambda: order.append("other"))

        ticks.await_next(first)
        for index in range(CALLS_PER_TURN):
            ticks.await_next(lambda index=index: order.append(f"call {index}"))  # type: ignore[misc]
        await asyncio.sleep(1.0)

    run(script)
    assert order[-2:] == ["other", f"call {CALLS_PER_TURN - 1}"]
    assert len(order) == CALLS_PER_TURN + 1


def test_a_bug_in_one_call_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    async def script(ticks: WriteTicks) -> None:
        ticks.await_next(lambda: [][0])
        ticks.await_next(lambda: called.append("other"))
        await asyncio.sleep(INTERVAL)
        await asyncio.sleep(INTERVAL)

    run(script)
    assert called == ["other"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
