"""The time to the first token is the same in the metrics and in the log."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.fakes.engine_link import install
from tests.support.engine_world import LENGTH, World


@pytest.fixture(autouse=True)
def no_sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


def test_a_reply_that_begins_anew_has_one_time_to_its_first_token() -> None:
    async def scenario() -> None:
        world = World()
        await world.engine()
        asked = await world.ask(1, stream=False)
        world.clock.now += 0.25
        await world.step(0, 1)
        world.clock.now += 2.0
        await world.lose()
        await world.engine()
        for _ in range(LENGTH):
            world.clock.now += 0.5
            await world.step(0, 1)
        assert asked.texts == asked.expected
        record = asked.generation._record
        assert record.time_to_first_token == pytest.approx(0.25)
        # Of the times between tokens, those of the engine that answered count.
        assert record.decoding == pytest.approx(0.5 * (LENGTH - 1))
        sample = world.metrics.registry.get_sample_value
        assert sample("tandem_time_to_first_token_seconds_count") == 1
        assert sample("tandem_time_to_first_token_seconds_sum") == pytest.approx(0.25)

    asyncio.run(scenario())


def test_the_log_has_the_first_choice_and_the_metrics_have_each() -> None:
    async def scenario() -> None:
        world = World()
        await world.engine()
        asked = await world.ask(2)
        world.clock.now += 0.25
        await world.step(1, 1)
        world.clock.now += 0.5
        await world.step(0, 1)
        await world.finish()
        assert asked.generation._record.time_to_first_token == pytest.approx(0.25)
        sample = world.metrics.registry.get_sample_value
        assert sample("tandem_time_to_first_token_seconds_count") == 2
        assert sample("tandem_time_to_first_token_seconds_sum") == pytest.approx(0.25 + 0.75)

    asyncio.run(scenario())
