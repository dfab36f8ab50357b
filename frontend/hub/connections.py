"""HTTP connections of a download, which are closed at once when one of its threads fails."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx

_SECONDS = 30.0
"""Timeout in seconds to connect or to receive the next bytes."""


class Connections:
    """HTTP client for several threads with connections that any thread can abort.

    Closing a socket does not wake up a thread that reads it; shutting it down does.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._is_cut = False

    def close(self) -> None:
        """Close all connections. No thread may be reading."""
        self._client.close()

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Send a GET request and yield the response before its body is read.

        Raises httpx.TransportError on failure and after `cut`.
        """
        with self._client.stream("GET", url, headers=headers, extensions={"trace": self._trace}) as answer:
            yield answer

    def cut(self) -> None:
        """Abort all connections, including new ones; threads that read them get an error."""
        with self._lock:
            self._is_cut = True
            for connection in self._open:
                _shut_down(connection)

    def _trace(self, event: str, facts: Mapping[str, Any]) -> None:
        """Record the socket of a new connection, reported by httpcore."""
        if not event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            return
        connection = facts["return_value"].get_extra_info("socket")
        with self._lock:
            self._open = [earlier for earlier in self._open if earlier.fileno() >= 0]
            self._open.append(connection)
            if self._is_cut:
                _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # already closed
        # Bypass the TLS socket's method, which would drop its state while another thread reads.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def open_connections(max_connections: int) -> Connections:
    """Create a client that uses the proxies and certificates of the environment.

    max_connections: maximum number of concurrent connections.
    """
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
    return Connections(httpx.Client(follow_redirects=True, timeout=httpx.Timeout(_SECONDS), limits=limits))
