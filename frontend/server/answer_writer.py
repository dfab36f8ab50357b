"""Writer of the body of one answer, past the layers of ASGI."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

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


class AnswerWriter:
    """Write parts of a body whose length is not known ahead.

    The headers have been sent and the end has not; ASGI sends both.
    """

    __slots__ = ("_cycle", "_flow", "_leave", "_resume", "num_written")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self.num_written = 0
        """Bytes of parts that were given to the transport."""
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
