"""The time for which a request waits for engines is bounded over its whole life."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.fakes.engine_link import install
from tests.support.engine_world import HOLD, LENGTH, World


@pytest.fixture(autouse=True)
def no_sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first_wait", [0.0, 20.0, HOLD - 1])
def test_waits_for_several_engines_count_together(stream: bool, first_wait: float) -> None:
    async def scenario() -> None:
        world = World()
        await world.engine()
        asked = await world.ask(stream=stream)
        await world.lose()
        await world.later(first_wait)
        await world.engine()
        await world.later(1000)  # queued at the second engine, which is no wait for one
        await world.lose()
        await world.later(HOLD - first_wait - 0.5)
        assert asked.error is None and world.client.num_held == 1
        await world.later(0.5)
        assert asked.error is not None and asked.error.status == 503
        assert "60 s (--hold-timeout)" in asked.error.message
        assert world.client.num_held == 0

    asyncio.run(scenario())


def test_a_third_engine_answers_within_the_time_that_is_left() -> None:
    async def scenario() -> None:
        world = World()
        await world.engine()
        asked = await world.ask(stream=False)
        for wait in (25.0, 30.0):
            await world.lose()
            await world.later(wait)
            await world.engine()
        await world.step(0, LENGTH)
        assert asked.error is None and asked.texts == asked.expected

    asyncio.run(scenario())
