"""Listener for TLS connections, which count from the start of their handshake."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from tandem.frontend.server.connections import Closed, Connection, Connections

_ACCEPTED_AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""
_PAUSE_SECONDS = 1.0
"""Pause after the system had no descriptor for another connection."""

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

    def start(
        self, context: ssl.SSLContext, timeout: float, connections: Connections, factory: ProtocolFactory
    ) -> asyncio.Task[None]:
        """Begin the handshake, after which the connection belongs to the protocol."""
        connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(context, timeout, connections, factory))
        return self._task

    def check(self, now: float) -> None:
        """Do nothing: the event loop ends a handshake that takes too long."""

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


class TlsListener:
    """Listener that accepts connections and begins their TLS handshakes."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        timeout: float,
        connections: Connections,
        factory: ProtocolFactory,
    ) -> None:
        """Prepare to listen on `sock`; a handshake may take `timeout` seconds."""
        self._sock = sock
        self._context = context
        self._timeout = timeout
        self._connections = connections
        self._factory = factory
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False

    def start(self) -> None:
        """Begin to accept connections."""
        self._sock.setblocking(False)
        self._is_open = True
        self._resume()

    def close(self) -> None:
        """Accept no more connections and end the handshakes."""
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._sock)
        for task in self._tasks:
            task.cancel()

    def _resume(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    loop = asyncio.get_running_loop()
                    loop.remove_reader(self._sock)
                    loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            sock.setblocking(False)
            handshake = Handshake(sock, f"{address[0]}:{address[1]}")
            task = handshake.start(self._context, self._timeout, self._connections, self._factory)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
