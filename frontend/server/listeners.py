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

from tandem.frontend.listening import plain_address
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
_FULL_SECONDS = 0.01
"""Pause while no further connection can be added."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Connect = Callable[[socket.socket, str], asyncio.Task[None]]
"""Function that begins to serve an accepted connection, given the address of its client."""
UNIX_PEER = "a Unix socket"
"""Address, for logs, of a client that has none."""


class Listeners:
    """Listening sockets of each slot, of which slots may share some.

    This process accepts from those that it is told to, and others may accept from them too. One that is no longer
    accepted from stays open: closing a listening socket resets the connections in its queue. What was accepted is
    served, whatever happens to the listener.
    """

    def __init__(self, slots: Sequence[Sequence[socket.socket]], connect: Connect, room: Callable[[int], int]) -> None:
        """Take over the sockets, from none of which is accepted yet.

        `room` returns how many connections can be added now, of a number; others wait in the queue of their socket.
        """
        self._sockets = tuple(map(tuple, slots))
        self._connect = connect
        self._room = room
        self._slots: frozenset[int] = frozenset()
        self._accepting: frozenset[socket.socket] = frozenset()
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
        self._slots = frozenset(slots)
        previous, self._accepting = (
            self._accepting,
            frozenset(sock for slot in self._slots for sock in self._sockets[slot]),
        )
        for sock in previous - self._accepting:
            loop.remove_reader(sock)
        for sock in self._accepting - previous:
            sock.setblocking(False)
            self._resume(sock)

    async def close(self) -> None:
        """Accept what waits already, then close this process's copies of the sockets.

        Connections without TLS have been opened when this returns, so that whoever counts them misses none.
        """
        for _ in range(_LAST_TURNS):
            if not sum([self._accept(sock, is_last=True) for sock in self._accepting]):
                break
            await asyncio.sleep(0)
        self.accept_from(())
        for sock in {sock for slot in self._sockets for sock in slot}:
            sock.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_OPENING_SECONDS)

    def cancel(self) -> None:
        """End the connections that are still being opened."""
        for task in self._tasks:
            task.cancel()

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._accepting:
            asyncio.get_running_loop().add_reader(listener, partial(self._accept, listener))

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(seconds, self._resume, listener)

    def _accept(self, listener: socket.socket, is_last: bool = False) -> int:
        """Accept connections and return their number; the last ones whether there is room or not."""
        # All processes accept from the one Unix socket; one at a time leaves some for those that have more time.
        most = 1 if listener.family == socket.AF_UNIX else _ACCEPTED_AT_ONCE
        if not is_last:
            most = self._room(most)
            if not most:
                self._pause(listener, _FULL_SECONDS)
        for count in range(most):
            try:
                sock, address = listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(listener, _PAUSE_SECONDS)
                return count
            sock.setblocking(False)
            is_unix = listener.family == socket.AF_UNIX
            peer = UNIX_PEER if is_unix else f"{plain_address(address[0])}:{address[1]}"
            task = self._connect(sock, peer)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return most


ProtocolFactory = Callable[[Connection], asyncio.Protocol]
"""Maker of the protocol of a connection, given the entry in the table of connections whose place it takes."""


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Load the certificate of the server.

    Raises OSError or ValueError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password=_no_password)
    return context


def _no_password() -> str:
    """Fail instead of prompting for the key's password on the terminal."""
    raise ValueError("the key is encrypted")


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

    @property
    def has_unread(self) -> bool:
        return False  # no request before the end of the handshake

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
