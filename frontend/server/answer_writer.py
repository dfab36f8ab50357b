"""Write response bodies directly to the transport, bypassing ASGI."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

UNSENT_BYTES = 16 * 2**10
"""Bytes of a response that the kernel buffers beyond the client's receive window (TCP_NOTSENT_LOWAT).

The default is megabytes, so a client that stopped reading would be noticed late.
"""


def bound_unsent(transport: asyncio.BaseTransport) -> None:
    """Limit the unsent bytes of a connection to UNSENT_BYTES."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # not TCP, or already closed
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


MAX_JOINED = 64 * 2**10
"""Largest chunk in bytes that is copied to join it with the headers. A larger chunk is written separately."""


class AnswerWriter:
    """Writer of the chunks of a response without Content-Length.

    ASGI sends the headers before it and the end after it.
    """

    __slots__ = ("_cycle", "_flow", "_leave", "_resume", "num_written")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self.num_written = 0
        """Bytes passed to the transport, by `write` or via ASGI."""
        self._cycle = cycle
        self._flow = flow
        self._resume: Callable[[], None] | None = None
        self._leave: Callable[[], None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once the status line has been sent."""
        return self._cycle.response_started

    @property
    def has_left(self) -> bool:
        """True once the client has disconnected."""
        return self._cycle.disconnected

    @property
    def is_paused(self) -> bool:
        """True while the write buffer of the transport is full."""
        return self._flow.write_paused

    def write(self, body: bytes) -> None:
        """Write a chunk; dropped if the client has disconnected."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        data = b"%x\r\n%b\r\n" % (len(body), body) if cycle.chunked_encoding else body
        self.num_written += len(data)
        cycle.transport.write(data)

    def abort(self) -> None:
        """Abort the connection and drop its unsent data."""
        self._cycle.transport.abort()

    def set_resume(self, resume: Callable[[], None] | None) -> None:
        """Call a function once writing is no longer paused."""
        self._resume = resume

    def set_leave(self, leave: Callable[[], None] | None) -> None:
        """Call a function when the client disconnects."""
        self._leave = leave
        if leave is not None:
            self._flow.resume_reading()  # otherwise the disconnect would not be noticed

    def leave(self) -> None:
        """Notify that the client has disconnected."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def resume(self) -> None:
        """Notify that the write buffer has drained."""
        if self._resume is not None:
            self._resume()


class JoinedHead(asyncio.Transport):
    """Transport of one response that joins its headers and the first chunk of its body.

    Two writes are two packets, which cost a short response more than its encoding. The headers are held until the end
    of the event loop iteration at most, and are sent with the body: it is written even if empty. For HEAD, which has no
    body, they are sent at once. After that the response uses the transport of the connection itself.
    """

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: Any) -> None:
        if not self._cycle.response_started:
            self._transport.write(data)  # 100 Continue
        elif self._head is None:
            self._head = data
            if self._cycle.scope["method"] == "HEAD":
                self._flush()
            else:
                asyncio.get_running_loop().call_soon(self._flush)
        elif len(data) <= MAX_JOINED:
            self._send(self._head + data)
        else:
            self._send(self._head)
            if not self._transport.is_closing():
                self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        """Send the headers alone, if the body is empty or late."""
        if self._head is not None:
            self._send(self._head)

    def _send(self, data: bytes) -> None:
        self._head = None
        if self._cycle.transport is self:
            self._cycle.transport = self._transport
        if not self._transport.is_closing():
            self._transport.write(data)


def join_head(cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
    """Set the transport of a response, once its request has arrived completely."""
    cycle.transport = transport if cycle.response_started else JoinedHead(cycle, transport)


def without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return the app for a client of HTTP/1.0, which does not support chunked encoding.

    A body without Content-Length then ends with the connection. Other clients get the app itself.
    """
    if cycle.scope["http_version"] != "1.0":
        return app

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        ends_with_connection = False

        async def send_plain(message: Message) -> None:
            nonlocal ends_with_connection
            if message["type"] == "http.response.start":
                ends_with_connection = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
                if ends_with_connection:
                    cycle.chunked_encoding = False
            elif ends_with_connection:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
