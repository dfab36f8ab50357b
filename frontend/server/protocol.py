"""HTTP/1.1 protocol of one connection.

It enforces limits before a request reaches the app.
"""

import asyncio
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tandem.frontend.api.live_stream import WRITER_KEY
from tandem.frontend.listening import ConnectionLimits, plain_address
from tandem.frontend.server import lingering, refusal
from tandem.frontend.server.answer_writer import AnswerWriter, bound_unsent, join_head, without_chunks
from tandem.frontend.server.body_parser import body_parser, framing
from tandem.frontend.server.connections import Closed, Connection, Connections, is_liveness_probe
from tandem.frontend.server.lingering import LingeringTransport, has_unread
from tandem.frontend.server.listeners import UNIX_PEER
from tandem.frontend.server.paths import is_health_check
from tandem.frontend.server.refusal import Refusal

MAX_PIPELINED = 16
"""Maximum number of pipelined requests per connection."""

_RETRY_SECONDS = 0.1
"""Grace period in seconds for a connection whose request has arrived but was not read yet."""

_HEADER_OVERHEAD = len(b": \r\n")


class _Input(Enum):
    """Parser state: what the next byte from the client belongs to."""

    NEW = auto()
    """Start of a request."""
    HEADERS = auto()
    BODY = auto()
    UNREAD = auto()
    """Rest of a request that was already answered; it is discarded and the connection closed."""


class _ParsingStoppedError(Exception):
    """A parser callback has refused the request.

    The parser replaces it by an error of its own.
    """


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 protocol that enforces limits on clients.

    Refusals have the error body of the request's API, if a response can still be sent.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        connections: Connections,
        successor_of: Connection | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._connections = connections
        self._successor_of = successor_of
        self.url = b""
        self._input = _Input.NEW
        self._refused: Refusal | None = None
        """Refusal raised by a parser callback."""
        self._num_headers = 0
        self._num_hosts = 0
        self._headers_size = 0
        self._unparsed = 0
        """Bytes received of incomplete headers, or of a body since its last content."""
        self._unread_allowance = 0
        """Bytes that may still be discarded before the connection is closed."""
        self._running: RequestResponseCycle | None = None
        """Request being handled by the app. The last one to arrive is in `cycle`, and may wait in `pipeline`."""
        self._last: RequestResponseCycle | None = None
        """Last request of the connection while the server drains."""
        self._deadline: float | None = None
        self._overdue = Closed.HEADER_TIMEOUT
        """Reason to close the connection once the deadline has passed."""
        self._bytes_left = 0
        """Bytes of the response accepted by the kernel when it last accepted some."""
        self._left_at = 0.0

    @property
    def peer(self) -> str:
        return f"{self.client[0]}:{self.client[1]}" if self.client else UNIX_PEER

    @property
    def _is_answering(self) -> bool:
        """True while a request is unanswered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _writer(self) -> AnswerWriter | None:
        """Writer of the current or last response."""
        return None if self._running is None else cast("AnswerWriter | None", self._running.scope.get(WRITER_KEY))

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.client = (plain_address(self.client[0]), self.client[1])
        bound_unsent(transport)
        self._left_at = self.loop.time()
        self._expire_after(self._limits.header_timeout, Closed.HEADER_TIMEOUT)
        self._connections.add(self, self._successor_of)
        if self._connections.grace is not None:
            self.drain(self._connections.grace)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._unset_keepalive_if_required()
        self._disconnect_app()
        if self.cycle is not None:
            self.cycle.transport = self.transport  # drop the reference back to this protocol
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._input is _Input.UNREAD:
            self._discard(len(data))
            return
        if self._input is _Input.NEW:
            self._begin_headers()
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._refused or refusal.malformed())
        else:
            self._after_parsing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if (writer := self._writer) is not None:
            writer.resume()

    def shutdown(self) -> None:
        super().shutdown()
        if self._input is _Input.UNREAD:
            self.transport.close()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._input is _Input.NEW:  # pipelined behind another request
            self._begin_headers()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url:
            self._stop_parsing(refusal.url_too_long(self._limits))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._headers_size += len(name) + len(value) + _HEADER_OVERHEAD
        if self._num_headers > self._limits.max_headers:
            self._stop_parsing(refusal.too_many_headers(self._limits))
        if self._headers_size > self._limits.max_headers_size:
            self._stop_parsing(refusal.headers_too_large(self._limits))
        if self._input is _Input.BODY:
            return  # a trailer, which must not pass for a header
        self._num_hosts += name.lower() == b"host"
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._num_hosts > 1 or (self._num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._stop_parsing(refusal.malformed(f"the request has {self._num_hosts} Host headers; send exactly one"))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parsing(refusal.too_many_pipelined(MAX_PIPELINED))
        if not self._connections.claim(self) and not is_liveness_probe(self.parser.get_method(), self.url):
            self._stop_parsing(refusal.too_busy(self._connections.max_requests))
        self._input = _Input.BODY
        self._unparsed = 0
        self._expire_after(self._limits.body_timeout, Closed.BODY_TIMEOUT)
        super().on_headers_complete()
        scope: dict[str, Any] = cast("Any", self.cycle.scope)
        scope[WRITER_KEY] = AnswerWriter(self.cycle, self.flow)
        if self.pipeline and self._last is not None and not self._last.response_started:
            self._last.keep_alive = True  # another one was pipelined

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)
        if not self._is_answering:
            self._discard(len(body))
        elif self._deadline is not None:
            self._deadline += len(body) / self._limits.body_rate

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and framing(self.headers):
            return  # the parser treats the body as another protocol
        self._input = _Input.NEW
        self._deadline = None
        if self._is_answering:
            join_head(self.cycle, self.transport)
        else:
            self._wait_for_request()
        super().on_message_complete()

    # Called by responses.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if self._connections.grace is not None:
            self._announce_end()
        start = partial(super()._start_asgi_task, cycle, without_chunks(cycle, app))
        if is_health_check(cycle.scope["path"]):
            start()  # a busy server must not be mistaken for a dead or unready one
        else:
            self._connections.starts.add(start)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering and self._input is not _Input.UNREAD:
            self._wait_for_request()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._connections.report(Closed.KEEP_ALIVE_TIMEOUT, self)
            self.transport.close()

    # Called by the table of connections.

    def check(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline and not self.transport.is_closing():
            if self.flow.read_paused:
                # The app has not read the received body, so the client is not late.
                self._expire_after(self._limits.body_timeout, self._overdue)
            else:
                self._deadline = None
                self._expire()
        self._check_backlog(now)

    def drain(self, grace: float) -> None:
        if self._is_answering:
            self._announce_end()
        elif self._input is _Input.NEW and (self._deadline is None or self._deadline > self.loop.time() + grace):
            self._expire_after(grace, Closed.DRAINED)

    @property
    def has_unread(self) -> bool:
        return self._input is not _Input.UNREAD and has_unread(self.transport)

    def evict(self) -> None:
        if self._input is _Input.HEADERS and not self._is_answering:
            busy = refusal.too_busy(self._connections.max_requests)
            self.transport.write(busy.response(self.server_state.default_headers, self.scope, self.url))
            self.transport.close()
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _announce_end(self) -> None:
        """Make the current request the last one of the connection.

        Its response gets `Connection: close`. If the response has started or requests are pipelined, the connection
        stays open until all responses are sent.
        """
        running = self._running
        if running is not None and running.keep_alive and not running.response_started and not self.pipeline:
            running.keep_alive = False
            self._last = running

    def _check_backlog(self, now: float) -> None:
        """Close the connection of a client that does not read the response.

        The kernel buffers little (`UNSENT_BYTES`), so it accepts more only while the client reads.
        """
        backlog = self.transport.get_write_buffer_size()
        left = (0 if self._writer is None else self._writer.num_written) - backlog
        if not backlog or left != self._bytes_left:
            self._bytes_left, self._left_at = left, now
        elif now - self._left_at >= self._limits.send_timeout:
            reason = f"the client has read nothing for {self._limits.send_timeout:g} s, {backlog} bytes wait to be sent"
            self._connections.report(Closed.SEND_TIMEOUT, self, reason)
            self.transport.abort()

    # Internals.

    def _parse(self, data: bytes) -> None:
        """Feed the parser.

        Only HTTP/1.1 is served, so the `Upgrade` header is ignored: the parser stops at it, and what follows is the
        body or the next request.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]
            else:
                return
            if self._input is _Input.BODY:
                self.parser = body_parser(self, framing(self.headers))

    def _begin_headers(self) -> None:
        self._input = _Input.HEADERS
        self._num_headers = self._num_hosts = self._headers_size = self._unparsed = 0
        if self._deadline is not None and self._overdue in (Closed.KEEP_ALIVE_TIMEOUT, Closed.DRAINED):
            self._expire_after(self._limits.header_timeout, Closed.HEADER_TIMEOUT)

    def _wait_for_request(self) -> None:
        """Set the keep-alive deadline of an idle connection."""
        self._connections.release(self)
        if self._input is _Input.NEW:
            self._expire_after(self._limits.keep_alive_timeout, Closed.KEEP_ALIVE_TIMEOUT)
            if self._connections.grace is not None:
                self.drain(self._connections.grace)
        elif self._input is _Input.HEADERS:
            self._expire_after(self._limits.header_timeout, Closed.HEADER_TIMEOUT)
        else:
            self._unread_allowance = lingering.UNREAD_BYTES
            self._expire_after(lingering.UNREAD_SECONDS, Closed.UNREAD_BODY)

    def _expire_after(self, seconds: float, overdue: Closed) -> None:
        self._deadline = self.loop.time() + seconds
        self._overdue = overdue

    def _expire(self) -> None:
        """Close the connection after its deadline has passed."""
        if self._overdue is Closed.BODY_TIMEOUT:
            self._refuse(refusal.body_timeout(self._limits))
        elif self._overdue is Closed.HEADER_TIMEOUT and self._input is _Input.HEADERS:
            self._refuse(refusal.header_timeout(self._limits))
        elif self._overdue is Closed.DRAINED and has_unread(self.transport):
            self._expire_after(_RETRY_SECONDS, Closed.DRAINED)
        elif self._overdue is Closed.DRAINED and self.transport.can_write_eof():
            self._connections.report(Closed.DRAINED, self)
            self._linger(lingering.REFUSED_BYTES, lingering.REFUSED_SECONDS)
        else:
            # No response is pending.
            if self._input is not _Input.UNREAD:
                self._connections.report(self._overdue, self)
            self.transport.close()

    def _after_parsing(self) -> None:
        """Limit headers, trailers and chunk lines; prepare for a late body."""
        limits = self._limits
        max_unparsed = limits.max_headers_size + (limits.max_url if self._input is _Input.HEADERS else 0)
        if self._unparsed > max_unparsed and self._input in (_Input.HEADERS, _Input.BODY):
            self._refuse(refusal.headers_too_large(limits))
        elif self._input is _Input.BODY and self._is_answering and self.cycle.transport is self.transport:
            self.cycle.transport = LingeringTransport(self.transport, self._linger_with_body)

    def _stop_parsing(self, refused: Refusal) -> None:
        """Abort the parser from a callback, with a refusal."""
        self._refused = refused
        raise _ParsingStoppedError

    def _refuse(self, refused: Refusal) -> None:
        """Send an error response unless one has started, then close the connection."""
        self._connections.report(refused.reason, self, f"{refused.message} ({refused.status})")
        if self.transport.is_closing():
            return
        if self._is_answering and (self._running is not self.cycle or self.cycle.response_started):
            self.transport.close()
        else:
            self.transport.write(refused.response(self.server_state.default_headers, self.scope, self.url))
            self._linger(lingering.REFUSED_BYTES, lingering.REFUSED_SECONDS)
        self.pipeline.clear()
        self._disconnect_app()

    def _disconnect_app(self) -> None:
        """Notify the app that the client has disconnected."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if (writer := self._writer) is not None:
                writer.leave()

    def _linger_with_body(self) -> None:
        self._linger(lingering.UNREAD_BYTES, lingering.UNREAD_SECONDS)

    def _linger(self, allowance: int, seconds: float) -> None:
        """Close the connection once the client has closed it or has sent more than these limits."""
        self._input = _Input.UNREAD
        self._unread_allowance = allowance
        self._connections.release(self)
        self._expire_after(seconds, Closed.UNREAD_BODY)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _discard(self, size: int) -> None:
        """Count discarded bytes of a request that was already answered."""
        self._unread_allowance -= size
        if self._unread_allowance < 0:
            if self._input is not _Input.UNREAD:
                self._connections.report(Closed.UNREAD_BODY, self)
            self.transport.abort()
