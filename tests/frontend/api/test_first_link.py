"""How long a frontend that starts waits for its engine, in virtual time."""

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.frontend.api.service import LINK_SECONDS, Service
from tests.support.virtual_loop import VirtualLoop


def seconds_until_served(statuses: Sequence[tuple[str, float]], stall: float = 0.0) -> float:
    """Return the time at which requests are let in.

    statuses: of the engine, each with the seconds for which it lasts; the last one stays. stall: seconds for which the
    process is held up at the start.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)

        def lasting() -> Iterator[str]:
            until = loop.time()
            for status, seconds in statuses:
                until += seconds
                while loop.time() < until - 1e-9:
                    yield status
            while True:
                yield statuses[-1][0]

        found = lasting()
        client = SimpleNamespace(health=lambda: SimpleNamespace(status=next(found)))
        service: Any = SimpleNamespace(client=client, link_awaited=asyncio.Event())

        async def serve() -> float:
            loop.call_soon(lambda: setattr(loop.clock, "now", loop.clock.now + stall))
            await Service.await_link(service)
            assert service.link_awaited.is_set()
            return loop.time()

        return runner.run(serve())


@pytest.mark.parametrize("status", ["ready", "loading", "lost", "refused"])
def test_requests_are_let_in_at_once_if_the_state_of_the_engine_is_known(status: str) -> None:
    assert seconds_until_served([(status, 0.0)]) == 0.0


def test_an_engine_without_a_heartbeat_counts_as_away() -> None:
    assert seconds_until_served([("waiting", 0.0)]) == pytest.approx(LINK_SECONDS, abs=0.05)


def test_a_handshake_is_waited_for_as_long_as_it_is_under_way() -> None:
    statuses = [("waiting", LINK_SECONDS - 0.5), ("connecting", 4.0), ("ready", 0.0)]
    assert seconds_until_served(statuses) == pytest.approx(LINK_SECONDS + 3.5, abs=0.05)


def test_time_for_which_the_process_was_held_up_does_not_count() -> None:
    stall = 3 * LINK_SECONDS
    statuses = [("waiting", stall + LINK_SECONDS / 2), ("ready", 0.0)]
    assert seconds_until_served(statuses, stall) == pytest.approx(stall + LINK_SECONDS / 2, abs=0.05)
