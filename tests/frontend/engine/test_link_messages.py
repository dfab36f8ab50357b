"""Messages of one link are all read, whatever is sent meanwhile."""

import asyncio
import select
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tandem.frontend.engine.link import MESSAGES_PER_TURN, EngineLink
from tandem.frontend.engine.streams import OpenStreams
from tandem.protocol.codec import decode_command, encode
from tandem.protocol.commands import Hello, Renew
from tandem.protocol.events import Answer, AnyEvent
from tandem.protocol.sockets import Transport, bind_router

SECONDS = 30.0
"""Seconds after which a test gives up waiting."""


class Engine:
    """The engine's end of a link, which the test reads and writes."""

    def __init__(self, ipc_dir: Path) -> None:
        self.endpoint = f"ipc://{ipc_dir}/engine"
        self.context = zmq.Context()
        self.router = bind_router(self.context, self.endpoint)
        self.peer = b""

    def next_command(self) -> object:
        assert self.router.poll(SECONDS * 1000), "no command came"
        self.peer, data = self.router.recv_multipart()
        return decode_command(data)

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.router.send_multipart([self.peer, encode(Answer(number, True))])


def linked(ipc_dir: Path, scenario: Callable[[Engine, EngineLink, list[AnyEvent]], Awaitable[None]]) -> list[AnyEvent]:
    """Run a scenario over a link whose Hello has arrived; return the events that were read."""
    events: list[AnyEvent] = []
    broken: list[str] = []

    async def run() -> None:
        engine, context = Engine(ipc_dir), zmq.asyncio.Context()
        link = EngineLink(context, 1, OpenStreams(), events.append, broken.append)
        link.open(engine.endpoint, Transport(), "frontend", 0.0)
        assert isinstance(engine.next_command(), Hello)
        try:
            async with asyncio.timeout(SECONDS):
                await scenario(engine, link, events)
        finally:
            link.close()
            context.term()
            engine.context.destroy(linger=0)

    asyncio.run(run())
    assert broken == []
    return events


async def until_read(events: list[AnyEvent], count: int) -> None:
    while len(events) < count:
        await asyncio.sleep(0.001)


def numbers(events: list[AnyEvent]) -> list[int]:
    return [event.call for event in events if isinstance(event, Answer)]


def test_a_message_that_arrives_before_a_send_is_read(ipc_dir: Path) -> None:
    async def scenario(engine: Engine, link: EngineLink, events: list[AnyEvent]) -> None:
        assert link._socket is not None
        await asyncio.sleep(0)  # The descriptor tells of a message once the socket was found empty.
        await asyncio.sleep(0)
        for number in range(20):
            engine.say(number)
            # The event loop does not run meanwhile; then the send takes note of the message.
            readable, _, _ = select.select([link._socket.fileno()], [], [], SECONDS)
            assert readable
            link.send(Renew())
            await until_read(events, number + 1)

    assert numbers(linked(ipc_dir, scenario)) == list(range(20))


@pytest.mark.parametrize("count", [MESSAGES_PER_TURN - 1, MESSAGES_PER_TURN, 3 * MESSAGES_PER_TURN + 1])
def test_many_messages_are_read_in_their_order_in_several_turns(ipc_dir: Path, count: int) -> None:
    turns: list[int] = []

    async def scenario(engine: Engine, _link: EngineLink, events: list[AnyEvent]) -> None:
        sent = asyncio.get_running_loop().run_in_executor(None, engine.say, *range(count))
        while len(events) < count:
            before = len(events)
            await asyncio.sleep(0)
            turns.append(len(events) - before)
        await sent

    assert numbers(linked(ipc_dir, scenario)) == list(range(count))
    assert max(turns) <= MESSAGES_PER_TURN


def test_a_link_that_an_event_closes_reads_no_further(ipc_dir: Path) -> None:
    async def scenario(engine: Engine, link: EngineLink, events: list[AnyEvent]) -> None:
        link._on_event = lambda event: (events.append(event), link.close())
        engine.say(1, 2, 3)
        await until_read(events, 1)
        await asyncio.sleep(0.01)

    assert numbers(linked(ipc_dir, scenario)) == [1]
