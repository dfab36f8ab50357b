"""Connections of a download, which end at once when one of its threads fails."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx

_SECONDS = 30.0
"""Longest wait for a server to connect or to send its next bytes."""


class Connections:
    """HTTP client of several threads whose open connections any thread can cut.

    Closing a socket does not wake a thread that reads it; shutting it down does.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._is_cut = False

    def close(self) -> None:
        """Close all connections. No thread may read one."""
        self._client.close()

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Send a request and give its answer, whose body is not read yet.

        Raises httpx.TransportError if that fails or the connections are cut.
        """
        with self._client.stream("GET", url, headers=headers, extensions={"trace": self._trace}) as answer:
            yield answer

    def cut(self) -> None:
        """End all connections, and each new one; threads that read them get an error."""
        with self._lock:
            self._is_cut = True
            for connection in self._open:
                _shut_down(connection)

    def _trace(self, event: str, facts: Mapping[str, Any]) -> None:
        """Keep the socket of a new connection, of which httpcore tells."""
        if not event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            return
        connection = facts["return_value"].get_extra_info("socket")
        with self._lock:
            self._open = [earlier for earlier in self._open if earlier.fileno() >= 0]
            self._open.append(connection)
            if self._is_cut:
                _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        # Not by the method of a TLS socket, which would drop its state under the thread that reads.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def open_connections(most: int) -> Connections:
    """Create a client with the proxies and certificates of the environment.

    most: connections at once.
    """
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
    return Connections(httpx.Client(follow_redirects=True, timeout=httpx.Timeout(_SECONDS), limits=limits))
