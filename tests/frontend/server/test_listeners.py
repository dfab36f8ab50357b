"""Listening sockets that are closed while connections wait in their queues."""

import asyncio
import socket

from tandem.frontend.listening import listen
from tandem.frontend.server.listeners import Listeners

CLIENTS = 3
TURNS = 4
"""Turns of the event loop that it takes to open a connection, more than asyncio needs."""


def test_last_connections_have_been_opened_when_the_sockets_are_closed() -> None:
    opened: list[socket.socket] = []

    async def serve(sock: socket.socket) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        opened.append(sock)

    async def close_with_a_queue() -> None:
        sock = listen("127.0.0.1", 0)
        listeners = Listeners([[sock]], lambda accepted, _: asyncio.create_task(serve(accepted)), lambda most: most)
        listeners.accept_from([0])
        clients = [socket.create_connection(sock.getsockname()) for _ in range(CLIENTS)]
        await listeners.close()
        assert len(opened) == CLIENTS
        for end in (*opened, *clients):
            end.close()

    asyncio.run(close_with_a_queue())
