"""What a new engine tells of the one before counts like an announcement."""

from typing import Any

import pytest

from tests.fakes.engine_link import install
from tests.frontend.generation.test_resubmission import run
from tests.support.engine_world import World
from tests.support.refusals import numbers_in


@pytest.fixture(scope="module", autouse=True)
def no_sockets() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.mark.parametrize("known", [True, False])
def test_a_request_that_had_begun_in_two_engines_without_their_word_gets_no_third(known: bool) -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(2)
        waiting = await world.ask()
        if known:
            await world.start(1)
        await world.lose()
        await world.engine(launched=[] if known else world.last_ids(asked)[1:])
        ids = world.last_ids(asked)
        await world.lose()
        assert not asked.task.done()
        last = await world.engine(launched=ids[:1])
        assert asked.error is not None and asked.error.status == 503
        assert numbers_in(asked.error.message)[:1] == [2]
        assert world.by_name(last) == [waiting.name]
        await world.finish()
        assert waiting.texts == waiting.expected

    run(scenario)


def test_a_request_that_turns_out_to_have_run_comes_after_those_that_waited() -> None:
    async def scenario(world: World) -> None:
        first = await world.engine()
        ran, waited = await world.ask(), await world.ask()
        await world.lose()
        link = await world.engine(launched=world.last_ids(ran))
        assert link.lost_identity == first.identity
        assert world.by_name(link) == [waited.name, ran.name]
        await world.finish()
        assert ran.texts == ran.expected

    run(scenario)
