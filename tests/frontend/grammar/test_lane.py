"""Which grammar gets a free process, in virtual time and with processes that only take time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar.lane import Lane
from tandem.frontend.grammar.process import Checked
from tests.fakes.grammar_compiler import FakeCompiler
from tests.support.virtual_loop import VirtualLoop

BUDGET, PATIENCE = 0.25, 16.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


def lane_of(size: int) -> tuple[Lane, list[tuple[float, str]]]:
    done: list[tuple[float, str]] = []
    return Lane("", [FakeCompiler(done) for _ in range(size)], BUDGET, PATIENCE), done


def test_client_with_one_grammar_waits_for_one_of_a_client_with_many() -> None:
    async def body() -> None:
        lane, done = lane_of(1)
        many = [asyncio.create_task(lane.compile("greedy", f"1 {number}")) for number in range(16)]
        await asyncio.sleep(0)
        await lane.compile("modest", "0.0625 modest")
        assert len(done) == 2
        await asyncio.gather(*many)
        assert [name for _, name in done if name != "0.0625 modest"] == [f"1 {number}" for number in range(16)]

    run(body())


def test_sixteen_clients_with_slow_grammars_delay_another_by_little() -> None:
    """They come back as soon as they are answered; the other one has used less than they have."""

    async def body() -> None:
        lane, _ = lane_of(2)
        loop = asyncio.get_running_loop()

        async def hostile(number: int) -> None:
            for turn in range(8):
                await lane.compile(f"hostile {number}", f"1 {number} {turn}")

        hostiles = [asyncio.create_task(hostile(number)) for number in range(16)]
        await asyncio.sleep(8 * BUDGET)
        waits = []
        for _ in range(10):
            began = loop.time()
            await lane.compile("modest", "0.0078125")
            waits.append(loop.time() - began)
        assert max(waits) <= 4 * BUDGET
        await asyncio.gather(*hostiles)

    run(body())


def test_grammar_waits_no_longer_than_the_lane_lets_it() -> None:
    async def body() -> None:
        lane, done = lane_of(1)
        ahead = [asyncio.create_task(lane.compile("", f"1 {number}")) for number in range(100)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"\b16 s\b") as caught:
            await lane.compile("", "0")
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        results = await asyncio.gather(*ahead, return_exceptions=True)
        assert len(done) == sum(result == Checked(None) for result in results) >= PATIENCE / BUDGET - 1
        await lane.compile("", "0")

    run(body())


def test_grammar_that_was_given_up_takes_no_process() -> None:
    async def body() -> None:
        lane, done = lane_of(1)
        first, given_up, last = (asyncio.create_task(lane.compile("", name)) for name in ("1 a", "1 b", "1 c"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(first, given_up, last, return_exceptions=True)
        assert [name for _, name in done] == ["1 a", "1 c"]

    run(body())
