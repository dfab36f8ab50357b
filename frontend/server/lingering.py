"""Close a connection while its client may still be sending.

Closing a socket with unread bytes resets the connection, and the client may lose the response.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Any

UNREAD_BYTES = 64 * 2**20
"""Bytes of a body that are read and discarded after the response.

Many clients read no response before they have sent everything, and would lose it if the connection were closed with
unread bytes.
"""
UNREAD_SECONDS = 10.0
"""Seconds for which the rest of a body is read and discarded."""

REFUSED_BYTES = 2**20
REFUSED_SECONDS = 2.0
"""The same limits for a request that never reached the app."""


class LingeringTransport(asyncio.Transport):
    """Transport of a response that is sent before the request body has arrived.

    It closes only after the client had time to send the rest and to read the response.
    """

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._linger = linger

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._linger()


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Return True if the socket has unread bytes or is at its end."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
