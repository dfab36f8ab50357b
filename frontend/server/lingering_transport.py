"""Transport of an answer that is sent before its request has arrived."""

import asyncio
from collections.abc import Callable
from typing import Any


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
