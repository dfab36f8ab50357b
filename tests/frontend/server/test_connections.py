"""The table of connections: whom it closes to make room, and how many may have a request."""

import asyncio
import logging
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.frontend_metrics import ConnectionMetrics
from tandem.frontend.server.connections import NEW_SECONDS, STARTS_PER_TURN, Closed, Connections, Starts
from tandem.protocol.rate_limited_log import RateLimitedLog
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in


class Recorded(RateLimitedLog):
    """A log that keeps all messages, without an event loop."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("connections"))
        self.messages: list[tuple[str, str]] = []

    def warning(self, kind: str, template: str, *values: object, extra: dict[str, Any] | None = None) -> None:
        self.messages.append((kind, template % values))


class Peer:
    """A connection that knows whether it was closed and when it was checked."""

    def __init__(self, name: int = 0) -> None:
        self.peer = f"peer {name}"
        self.is_evicted = False
        self.has_unread = False
        self.grace: float | None = None
        self.checks: list[float] = []

    def check(self, now: float) -> None:
        self.checks.append(now)

    def evict(self) -> None:
        assert not self.is_evicted
        self.is_evicted = True

    def drain(self, grace: float) -> None:
        self.grace = grace


class Table(Connections):
    def __init__(self, limit: int) -> None:
        self.registry = CollectorRegistry()
        self.log = Recorded()
        self.clock = FakeClock()
        super().__init__(limit, 0.001, ConnectionMetrics(self.registry), self.log, self.clock)


def test_connection_with_unread_bytes_is_not_replaced() -> None:
    table = Table(3)
    peers = [Peer(name) for name in range(6)]
    for peer in peers[:3]:
        table.add(peer)
    assert table.room(5) == 0, "a request of each may be on its way"
    table.clock.advance(NEW_SECONDS)
    peers[0].has_unread = True
    assert [table.room(most) for most in (0, 1, 5)] == [0, 1, 2]
    table.add(peers[3])
    assert [peer.is_evicted for peer in peers[:3]] == [False, True, False]
    peers[2].has_unread = peers[3].has_unread = True
    assert table.room(5) == 0
    table.add(peers[4])  # whether there is room or not
    assert peers[0].is_evicted and len(table) == 3
    table.claim(peers[2])
    table.clock.advance(NEW_SECONDS)
    assert table.room(5) == 1, "the newest has sent nothing"
    table.remove(peers[3])
    assert [table.room(most) for most in (1, 5)] == [1, 2]


@pytest.mark.parametrize(("limit", "most"), [(2, 1), (8, 7), (16, 14), (64, 56), (512, 448), (16384, 16320)])
def test_an_eighth_of_the_places_but_at_most_64_is_kept_from_requests(limit: int, most: int) -> None:
    assert Table(limit).max_requests == most


STEPS = st.lists(st.tuples(st.sampled_from(["add", "claim", "release", "remove"]), st.integers(0, 30)))


@given(st.integers(2, 12), STEPS)
def test_table_keeps_its_limits_and_evicts_the_longest_waiting(limit: int, steps: list[tuple[str, int]]) -> None:
    table = Table(limit)
    waiting: list[Peer] = []
    busy: list[Peer] = []
    for step, number in steps:
        everyone = waiting + busy
        chosen = everyone[number % len(everyone)] if everyone else Peer()
        if step == "add":
            new = Peer(number)
            expected = waiting.pop(0) if len(everyone) >= limit else None
            table.add(new)
            assert expected is None or expected.is_evicted
            waiting.append(new)
        elif step == "claim" and everyone:
            accepted = table.claim(chosen)
            assert accepted == (chosen in busy or len(busy) < table.max_requests)
            if accepted and chosen in waiting:
                waiting.remove(chosen)
                busy.append(chosen)
        elif step == "release" and chosen in busy:
            table.release(chosen)
            busy.remove(chosen)
            waiting.append(chosen)
        elif step == "remove" and everyone:
            table.remove(chosen)
            (busy if chosen in busy else waiting).remove(chosen)
        assert len(table) == len(waiting) + len(busy) <= limit
        assert table.num_requests == len(busy) <= table.max_requests
        assert not any(peer.is_evicted for peer in waiting + busy)


def test_successor_takes_the_place_of_its_entry_in_a_full_table() -> None:
    table = Table(2)
    first, second, third = Peer(1), Peer(2), Peer(3)
    table.add(first)
    table.add(second)
    table.add(third, successor_of=second)
    assert len(table) == 2
    assert not first.is_evicted
    assert not second.is_evicted


def test_removed_connection_is_not_taken_back_by_its_release() -> None:
    table, peer = Table(2), Peer()
    table.add(peer)
    assert table.claim(peer)
    table.remove(peer)
    table.release(peer)
    assert len(table) == 0


def test_eviction_is_counted_and_says_what_to_raise() -> None:
    table = Table(2)
    for number in range(3):
        table.add(Peer(number))
    ((kind, message),) = table.log.messages
    assert kind == Closed.EVICTED
    assert "peer 0: " in message and numbers_in(message)[-1] == 2
    assert "--limit-concurrency" in message
    name = "tandem_frontend_connections_closed_total"
    assert table.registry.get_sample_value(name, {"reason": "evicted"}) == 1


def test_every_connection_is_checked_again_and_again() -> None:
    async def run() -> None:
        table = Table(2000)
        peers = [Peer(number) for number in range(1000)]
        for peer in peers:
            table.add(peer)
            if peer is not peers[0]:
                table.claim(peer)
        watch: asyncio.Task[Any] = asyncio.create_task(table.watch())
        async with asyncio.timeout(120):
            while min(len(peer.checks) for peer in peers) < 2:
                await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(run())


def test_drain_tells_every_connection_a_few_in_each_turn_of_the_loop() -> None:
    async def run() -> None:
        table = Table(2000)
        peers = [Peer(number) for number in range(1000)]
        for peer in peers:
            table.add(peer)
        told = [0]
        drain = asyncio.create_task(table.drain(5.0, 3600.0))
        async with asyncio.timeout(120):
            while told[-1] < len(peers):
                await asyncio.sleep(0)
                told.append(sum(peer.grace == 5.0 for peer in peers))
        assert max(later - earlier for earlier, later in pairwise(told)) <= 256
        assert table.grace == 5.0
        for peer in peers:
            table.remove(peer)
        await asyncio.wait_for(drain, 30)

    asyncio.run(run())


def test_drain_checks_deadlines_and_ends_with_its_timeout() -> None:
    async def run() -> None:
        table, idle, busy = Table(10), Peer(1), Peer(2)
        table.add(idle)
        table.add(busy)
        assert table.claim(busy)
        await table.drain(5.0, 0.3)
        assert len(table) == 2
        assert idle.checks
        assert busy.checks
        answered = asyncio.create_task(table.wait_until_answered(3600.0))
        await asyncio.sleep(0)
        assert not answered.done()
        table.release(busy)
        await asyncio.wait_for(answered, 30)
        assert table.claim(busy)
        await table.wait_until_answered(0.0)

    asyncio.run(run())


def test_a_few_requests_begin_in_each_turn_of_the_event_loop() -> None:
    begun: list[int] = []
    of_turns: list[int] = []

    async def run() -> None:
        starts = Starts()
        for number in range(2 * STARTS_PER_TURN + 3):
            starts.add(partial(begun.append, number))
        while not of_turns or of_turns[-1] != len(begun):
            of_turns.append(len(begun))
            await asyncio.sleep(0)
        starts.add(partial(begun.append, -1))
        assert begun[-1] == -1, "none waits once all have begun"

    asyncio.run(run())
    assert begun == [*range(2 * STARTS_PER_TURN + 3), -1]
    assert of_turns == [STARTS_PER_TURN, 2 * STARTS_PER_TURN, 2 * STARTS_PER_TURN + 3]
