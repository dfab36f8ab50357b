"""Requests that a new engine has no room for, after the loss of the one that had."""

from collections.abc import Iterator

import pytest

from tandem.protocol.errors import ErrorCode
from tests.fakes.engine_link import install
from tests.frontend.generation.test_resubmission import run
from tests.support.engine_world import World


@pytest.fixture(scope="module", autouse=True)
def no_sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.mark.parametrize("has_room", [True, False])
def test_a_request_that_lost_its_engine_waits_for_room_in_the_next(has_room: bool) -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(2)
        await world.lose()
        link = await world.engine()
        for _ in range(3 if has_room else 40):
            link.fail([one.request_id for one in world.open()], ErrorCode.OVERLOADED)
            world.ended |= {one.request_id for one in link.submitted}
            await world.settle()
            assert world.client.num_held == (not asked.task.done())
            await world.later(2.0)
        await world.finish()
        if has_room:
            assert asked.error is None and asked.texts == asked.expected
        else:
            assert asked.error is not None and asked.error.status == 503
            assert "60 s (--hold-timeout)" in asked.error.message

    run(scenario)


@pytest.mark.parametrize(("runs", "lost"), [(False, False), (True, True)])
def test_a_request_refused_for_load_is_not_repeated_without_a_loss_or_once_it_has_run(runs: bool, lost: bool) -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(stream=False)
        if lost:
            await world.lose()
            await world.engine()
        if runs:
            await world.start(0)
        assert world.link is not None
        world.link.fail([one.request_id for one in world.open()], ErrorCode.OVERLOADED)
        await world.settle()
        assert asked.error is not None and asked.error.status == 429

    run(scenario)


def test_a_refusal_that_says_when_to_try_again_is_the_answer_also_after_a_loss() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask()
        await world.lose()
        link = await world.engine()
        link.fail([one.request_id for one in world.open()], ErrorCode.OVERLOADED, retry_after=10)
        await world.settle()
        assert asked.error is not None and (asked.error.status, asked.error.retry_after) == (429, 10)
        assert world.client.num_held == 0

    run(scenario)
