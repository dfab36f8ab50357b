"""End of a connection whose client may still be sending.

A socket that is closed with unread bytes resets its connection, and the client may lose the answer.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Any

UNREAD_BYTES = 64 * 2**20
"""Bytes of a body that are read and discarded after the answer to its request.

Many clients read no answer before they have sent everything, and would lose it if the connection were closed with
unread bytes."""
UNREAD_SECONDS = 10.0
"""Seconds for which the rest of a body is read and discarded."""

REFUSED_BYTES = 2**20
REFUSED_SECONDS = 2.0
"""Bytes and seconds of the same for a request that never reached the app."""


class LingeringTransport(asyncio.Transport):
    """Transport of an answer that is sent before the body of its request has arrived.

    It closes only after the client had the chance to send the rest and to read the answer.
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
    """Tell whether bytes of the client, or its end, wait to be read."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
