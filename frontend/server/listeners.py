"""Listening sockets of one process, and TLS handshakes.

A TLS connection counts from the start of its handshake.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from tandem.frontend.server.connections import Closed, Connection, Connections

_ACCEPTED_AT_ONCE = 64
"""Connections accepted from one socket in one turn of the event loop."""
_LAST_TURNS = 64
"""Turns of the event loop in which the connections that wait in a socket's queue are accepted before it is closed."""
_OPENING_SECONDS = 0.1
"""Time for which connections that are being opened are waited for, the last ones among them. TLS handshakes may take
longer; they count as connections from their start."""
_PAUSE_SECONDS = 1.0
"""Pause after the system had no descriptor for another connection."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Connect = Callable[[socket.socket, str], asyncio.Task[None]]
"""Function that begins to serve an accepted connection, given the address of its client."""


class Listeners:
    """Listening sockets, one for each slot.

    This process accepts from those that it is told to, and others may accept from them too. One that is no longer
    accepted from stays open: closing a listening socket resets the connections in its queue. What was accepted is
    served, whatever happens to the listener.
    """

    def __init__(self, sockets: Sequence[socket.socket], connect: Connect) -> None:
        """Take over the sockets, from none of which is accepted yet."""
        self._sockets = tuple(sockets)
        self._connect = connect
        self._slots: frozenset[int] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()
        """Connections that are being opened."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Indices of the sockets that are accepted from."""
        return tuple(sorted(self._slots))

    def accept_from(self, slots: Iterable[int]) -> None:
        """Accept from the sockets of these slots and from no other.

        Raises IndexError for a slot that has none.
        """
        loop = asyncio.get_running_loop()
        previous, self._slots = self._slots, frozenset(slots)
        for slot in previous - self._slots:
            loop.remove_reader(self._sockets[slot])
        for slot in self._slots - previous:
            self._sockets[slot].setblocking(False)
            self._resume(slot)

    async def close(self) -> None:
        """Accept what waits already, then close this process's copies of the sockets.

        Connections without TLS have been opened when this returns, so that whoever counts them misses none.
        """
        for _ in range(_LAST_TURNS):
            if not sum([self._accept(slot) for slot in self._slots]):
                break
            await asyncio.sleep(0)
        self.accept_from(())
        for sock in self._sockets:
            sock.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_OPENING_SECONDS)

    def cancel(self) -> None:
        """End the connections that are still being opened."""
        for task in self._tasks:
            task.cancel()

    def _resume(self, slot: int) -> None:
        if slot in self._slots:
            asyncio.get_running_loop().add_reader(self._sockets[slot], partial(self._accept, slot))

    def _accept(self, slot: int) -> int:
        """Accept connections and return their number."""
        for count in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._sockets[slot].accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    loop = asyncio.get_running_loop()
                    loop.remove_reader(self._sockets[slot])
                    loop.call_later(_PAUSE_SECONDS, self._resume, slot)
                return count
            sock.setblocking(False)
            task = self._connect(sock, f"{address[0]}:{address[1]}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return _ACCEPTED_AT_ONCE


ProtocolFactory = Callable[[Connection], asyncio.Protocol]
"""Maker of the protocol of a connection, given the entry in the table of connections whose place it takes."""


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Load the certificate of the server.

    Raises OSError or ValueError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


class Handshake:
    """A connection whose TLS handshake is not complete."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._sock = sock
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._deadline: float | None = None

    def start(
        self, context: ssl.SSLContext, timeout: float, connections: Connections, factory: ProtocolFactory
    ) -> asyncio.Task[None]:
        """Begin the handshake, after which the connection belongs to the protocol."""
        connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(context, timeout, connections, factory))
        return self._task

    def check(self, now: float) -> None:
        """End the handshake if it takes too long while the server drains.

        Otherwise the event loop ends it.
        """
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self.evict()

    def drain(self, grace: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + grace

    def evict(self) -> None:
        assert self._task is not None
        self._task.cancel()
        if not self._has_begun:
            self._sock.close()

    async def _run(
        self, context: ssl.SSLContext, timeout: float, connections: Connections, factory: ProtocolFactory
    ) -> None:
        self._has_begun = True
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: factory(self), self._sock, ssl=context, ssl_handshake_timeout=timeout
            )
        except ConnectionError:
            # A probe of the port, or a client that gave up: nothing that a setting here would change.
            connections.report(Closed.HANDSHAKE, self)
        except OSError as error:
            why = f"the TLS handshake failed ({type(error).__name__}: {error})"
            connections.report(Closed.HANDSHAKE, self, why)
        finally:
            connections.remove(self)
