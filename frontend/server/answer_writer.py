"""Writer of the body of one answer, past the layers of ASGI, and its transport."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

UNSENT_BYTES = 16 * 2**10
"""Bytes of an answer that the system takes beyond those that the client has room for.

By default it takes megabytes, and a client that has stopped reading would be noticed late."""


def bound_unsent(transport: asyncio.BaseTransport) -> None:
    """Set the bound of UNSENT_BYTES for a connection."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # of another family, or gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


MAX_JOINED = 64 * 2**10
"""Bytes of a part of a body that are copied to join them with the head. A longer part is a second write."""


class AnswerWriter:
    """Write parts of a body whose length is not known ahead.

    The headers have been sent and the end has not; ASGI sends both.
    """

    __slots__ = ("_cycle", "_flow", "_leave", "_resume", "num_written")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self.num_written = 0
        """Bytes of parts that were given to the transport, by `write` or by ASGI."""
        self._cycle = cycle
        self._flow = flow
        self._resume: Callable[[], None] | None = None
        self._leave: Callable[[], None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once the status has been sent."""
        return self._cycle.response_started

    @property
    def has_left(self) -> bool:
        """True once the client has gone."""
        return self._cycle.disconnected

    @property
    def is_paused(self) -> bool:
        """True while the client reads too slowly for more to be written."""
        return self._flow.write_paused

    def write(self, body: bytes) -> None:
        """Write a part of the body, which is dropped if the client has gone."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        data = b"%x\r\n%b\r\n" % (len(body), body) if cycle.chunked_encoding else body
        self.num_written += len(data)
        cycle.transport.write(data)

    def abort(self) -> None:
        """Close the connection without what waits to be sent."""
        self._cycle.transport.abort()

    def set_resume(self, resume: Callable[[], None] | None) -> None:
        """Call a function when the writer is no longer paused."""
        self._resume = resume

    def set_leave(self, leave: Callable[[], None] | None) -> None:
        """Call a function when the client goes."""
        self._leave = leave
        if leave is not None:
            self._flow.resume_reading()  # or its going would not be noticed

    def leave(self) -> None:
        """Tell that the client has gone."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def resume(self) -> None:
        """Tell that the client has caught up."""
        if self._resume is not None:
            self._resume()


class JoinedHead(asyncio.Transport):
    """Transport of one answer that joins its head and the first part of its body.

    Two writes are two packets, and cost a short answer more than its encoding. The head waits until the end of the turn
    of the event loop, but never beyond its answer: a body is written even if it is empty, and to HEAD, which gets none,
    the head is sent at once. From then on the answer has the transport of the connection itself.
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
        """Send a head without a body, or ahead of a late one."""
        if self._head is not None:
            self._send(self._head)

    def _send(self, data: bytes) -> None:
        self._head = None
        if self._cycle.transport is self:
            self._cycle.transport = self._transport
        if not self._transport.is_closing():
            self._transport.write(data)


def join_head(cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
    """Give an answer its transport, once its request has arrived completely."""
    cycle.transport = transport if cycle.response_started else JoinedHead(cycle, transport)


def without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return the app that answers a client of HTTP/1.0, which knows no chunks.

    A body whose length is not told ahead ends with the connection. For other clients it is the app itself.
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
