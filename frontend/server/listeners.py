"""Listening sockets of one process, and TLS handshakes.

A TLS connection is counted from the start of its handshake.
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
"""Connections accepted per socket and event loop iteration."""
_LAST_TURNS = 64
"""Event loop iterations in which queued connections are accepted before a socket is closed."""
_OPENING_SECONDS = 0.1
"""Seconds to wait for connections that are being opened at the end. TLS handshakes may take longer; they count as
connections from their start."""
_PAUSE_SECONDS = 1.0
"""Seconds to pause after the process ran out of file descriptors."""
_FULL_SECONDS = 0.01
"""Seconds to pause while the table is full."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Connect = Callable[[socket.socket, str], asyncio.Task[None]]
"""Function that starts serving an accepted connection, given the client's address."""
UNIX_PEER = "a Unix socket"
"""Address to log for a client that has none."""


class Listeners:
    """Listening sockets of each slot; slots may share sockets.

    This process accepts from the slots assigned to it, and others may accept from them too. A slot that is no longer
    accepted from stays open, because closing a listening socket resets its queued connections. Accepted connections are
    served, whatever happens to the listener.
    """

    def __init__(self, slots: Sequence[Sequence[socket.socket]], connect: Connect, room: Callable[[int], int]) -> None:
        """Take over the sockets without accepting yet.

        room: returns how many connections can be added now, of a number; the others wait in the queue of their socket.
        """
        self._sockets = tuple(map(tuple, slots))
        self._connect = connect
        self._room = room
        self._slots: frozenset[int] = frozenset()
        self._accepting: frozenset[socket.socket] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()
        """Connections being opened."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Indices of the slots to accept from."""
        return tuple(sorted(self._slots))

    def accept_from(self, slots: Iterable[int]) -> None:
        """Accept from the sockets of these slots only.

        Raises IndexError for an unknown slot.
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
        """Accept queued connections, then close this process's copies of the sockets.

        Connections without TLS are open when this returns, so that their count is complete.
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
        """Close connections that are still being opened."""
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
        """Accept connections and return their number. is_last: ignore the limit."""
        # All processes accept from the shared Unix socket; one connection at a time balances them.
        limit = 1 if listener.family == socket.AF_UNIX else _ACCEPTED_AT_ONCE
        if not is_last:
            limit = self._room(limit)
            if not limit:
                self._pause(listener, _FULL_SECONDS)
        for count in range(limit):
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
        return limit


ProtocolFactory = Callable[[Connection], asyncio.Protocol]
"""Builds the protocol of a connection, given the table entry that it replaces."""


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Load the certificate and key of the server.

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
        """Start the handshake, after which the protocol takes over the connection."""
        connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(context, timeout, connections, factory))
        return self._task

    def check(self, now: float) -> None:
        """Abort a slow handshake while the server drains.

        Otherwise the event loop has a timeout for it.
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
            # A port scan, or a client that gave up: not a fault of the settings.
            connections.report(Closed.HANDSHAKE, self)
        except OSError as error:
            reason = f"the TLS handshake failed ({type(error).__name__}: {error})"
            connections.report(Closed.HANDSHAKE, self, reason)
        finally:
            connections.remove(self)
