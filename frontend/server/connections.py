"""Table of the open connections of one process.

It bounds their number, chooses the one to close when there are too many, and checks their deadlines.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Protocol

from tandem.frontend.metrics.frontend_metrics import ConnectionMetrics
from tandem.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

REPLACEABLE_SECONDS = 0.5
"""Time for which a connection has to be without a request before another replaces it: before, one may be on its way."""
_SCANNED = 64
"""Connections among which one to close is looked for."""
_SLICE = 256
"""Connections that are checked in one turn of the event loop."""
STARTS_PER_TURN = 4
"""Requests that begin to be served in one turn of the event loop; each takes about a millisecond of it.

A probe that comes behind thousands of requests waits for as many turns as it takes to accept their connections."""
_MAX_SPARE = 64
_DRAIN_SECONDS = 0.1
"""Time between two checks of the deadlines of all connections while the server drains."""


class Closed(StrEnum):
    """Reason for which the server closed a connection or refused a request.

    It is a label of the metrics.
    """

    MALFORMED = "malformed"
    HEADERS_TOO_LARGE = "headers_too_large"
    TOO_MANY_HEADERS = "too_many_headers"
    URL_TOO_LONG = "url_too_long"
    TOO_MANY_PIPELINED = "too_many_pipelined"
    HANDSHAKE = "tls_handshake"
    HEADER_TIMEOUT = "header_timeout"
    BODY_TIMEOUT = "body_timeout"
    KEEP_ALIVE_TIMEOUT = "keep_alive_timeout"
    UNREAD_BODY = "unread_body"
    SEND_TIMEOUT = "send_timeout"
    EVICTED = "evicted"
    DRAINED = "draining"
    BUSY = "connection_limit"


class Connection(Protocol):
    """One connection of a client."""

    @property
    def peer(self) -> str:
        """Address of the client, for logs."""
        ...

    @property
    def has_unread(self) -> bool:
        """True if bytes of the client wait to be read, maybe a request."""
        ...

    def check(self, now: float) -> None:
        """End the connection if it is over one of its deadlines.

        `now` is in seconds of the event loop's clock.
        """
        ...

    def evict(self) -> None:
        """Close the connection now, to make room for another.

        A client that has sent a part of a request gets an answer.
        """
        ...

    def drain(self, grace: float) -> None:
        """Serve at most one more request, which has to begin within `grace` seconds."""
        ...


class Starts:
    """Starts of requests, a few in each turn of the event loop.

    When thousands of them arrive at once, the output of others and the answers to probes do not wait for all.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = STARTS_PER_TURN
        """Requests that may still begin in this turn."""

    def add(self, start: Callable[[], None]) -> None:
        """Call a function that starts a request, once its turn has come."""
        if self._left == STARTS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            start()
        else:
            self._waiting.append(start)

    def _next_turn(self) -> None:
        self._left = STARTS_PER_TURN
        for _ in range(min(len(self._waiting), STARTS_PER_TURN)):
            self.add(self._waiting.popleft())


class Connections:
    """The table of open connections, of which there are at most `limit`.

    A connection has a request from the last byte of its headers to the last byte of the answer. A connection beyond the
    limit replaces the one that has been without a request for the longest time, unless a request of it may be on its
    way: that is so for REPLACEABLE_SECONDS, and while bytes of it are unread. A few connections are kept from requests,
    so that a request beyond the others can be answered.
    """

    def __init__(
        self,
        limit: int,
        interval: float,
        metrics: ConnectionMetrics,
        log: RateLimitedLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty table; deadlines are checked every `interval` seconds."""
        self.limit = limit
        self.max_requests = limit - max(1, min(_MAX_SPARE, limit // 8))
        """Limit on connections that have a request."""
        self.grace: float | None = None
        """Seconds in which a connection has to begin its last request; None until the server drains."""
        self.starts = Starts()
        """Starts of the requests of all connections."""
        self._interval = interval
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._waiting: OrderedDict[Connection, float] = OrderedDict()
        """Connections without a request with the time since when, the oldest first."""
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    @property
    def num_requests(self) -> int:
        """Number of connections that have a request."""
        return len(self._busy)

    def add(self, connection: Connection, successor_of: Connection | None = None) -> None:
        """Add a new connection.

        If the table is full, close the connection that has been without a request for the longest time, of those
        that can be replaced if there is one. `successor_of` is the entry that it replaces, if there is one.
        """
        if successor_of is not None:
            self.remove(successor_of)
        if len(self) >= self.limit:
            oldest = next(self._replaceable(), None) or next(iter(self._waiting))
            del self._waiting[oldest]
            why = f"all {self.limit} connections are taken, so the oldest without a request is closed"
            self.report(Closed.EVICTED, oldest, f"{why}; raise --limit-concurrency and ulimit -n if clients need more")
            oldest.evict()
        self._waiting[connection] = self._clock()

    def room(self, most: int) -> int:
        """Return the number of connections that can be added now, at most `most`.

        None that may have a request on its way would be closed for them.
        """
        free = self.limit - len(self)
        return free if free >= most else min(most, free + sum(1 for _ in self._replaceable()))

    def _replaceable(self) -> Iterator[Connection]:
        """Yield connections of which no request is on its way, the one to close first before the others."""
        latest = self._clock() - REPLACEABLE_SECONDS
        for connection, since in islice(self._waiting.items(), _SCANNED):
            if since > latest:
                return
            if not connection.has_unread:
                yield connection

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended. Idempotent."""
        self._waiting.pop(connection, None)
        self._busy.discard(connection)

    def claim(self, connection: Connection) -> bool:
        """Mark a connection as one with a request.

        Returns False if too many have one.
        """
        if connection not in self._busy:
            if len(self._busy) >= self.max_requests:
                return False
            self._waiting.pop(connection, None)
            self._busy.add(connection)
        return True

    def release(self, connection: Connection) -> None:
        """Mark a connection as one without a request, unless it was removed."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._waiting[connection] = self._clock()

    def report(self, reason: Closed, connection: Connection, message: str = "") -> None:
        """Count a closed connection or a refusal, and log the message if given."""
        self._metrics.closed.labels(reason.value).inc()
        if message:
            self._log.warning(reason.value, "connection from %s: %s", connection.peer, message)

    async def watch(self) -> None:
        """Check the deadlines of all connections until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            await self._check_all()

    async def drain(self, grace: float, timeout: float) -> None:
        """Wait until no connection is left, for at most `timeout` seconds.

        A request is told with its answer that it was the last one of its connection. A connection without one is not
        closed at once, because a request may be on its way to it: it has `grace` seconds to begin its last.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self.grace = grace
        async for connection in self._in_slices():
            connection.drain(grace)
        while len(self) and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_SECONDS)
            await self._check_all()

    async def wait_until_answered(self, timeout: float) -> None:
        """Wait until no connection has a request, for at most `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self.num_requests and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_SECONDS)

    async def _check_all(self) -> None:
        loop = asyncio.get_running_loop()
        async for connection in self._in_slices():
            connection.check(loop.time())

    async def _in_slices(self) -> AsyncIterator[Connection]:
        """Yield all present connections, a few in each turn of the event loop."""
        everyone = [*self._waiting, *self._busy]
        for start in range(0, len(everyone), _SLICE):
            for connection in everyone[start : start + _SLICE]:
                yield connection
            await asyncio.sleep(0)


def is_liveness_probe(method: bytes, url: bytes) -> bool:
    """Tell whether a request is answered even when too many connections have one.

    A busy server must not be taken for a dead one. The connection can be evicted as if it had no request.
    """
    return method in (b"GET", b"HEAD") and url.partition(b"?")[0].rstrip(b"/") == b"/health/live"
