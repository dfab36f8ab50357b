"""Table of the open connections of one process.

It limits their number, chooses the one to close when there are too many, and checks their deadlines.
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

REPLACEABLE_SECONDS, NEW_SECONDS = 0.5, 2.0
"""Seconds that a connection must be idle, after a request or before its first, until a new one may replace it.

Until then a request may be in flight: a client that begins hundreds at once is late with the first ones."""
_SCANNED = 64
"""Maximum connections that are searched for one to close."""
_SLICE = 256
"""Connections checked per event loop iteration."""
STARTS_PER_TURN = 4
"""Requests started per event loop iteration; each takes about a millisecond.

A health check behind thousands of requests waits as many iterations as it takes to accept their connections.
"""
_MAX_SPARE = 64
_DRAIN_SECONDS = 0.1
"""Seconds between two checks of all deadlines while the server drains."""


class Closed(StrEnum):
    """Reason why the server closed a connection or refused a request.

    Used as a label of the metrics.
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
        """True if the socket has unread bytes, which may be a request."""
        ...

    def check(self, now: float) -> None:
        """Close the connection if one of its deadlines has passed.

        now: seconds of the event loop's clock.
        """
        ...

    def evict(self) -> None:
        """Close the connection to make room for another.

        A client that has sent part of a request gets a response.
        """
        ...

    def drain(self, grace: float) -> None:
        """Serve at most one more request, which must start within `grace` seconds."""
        ...


class Starts:
    """Queue that starts a few requests per event loop iteration.

    It keeps output of running requests and health checks responsive when thousands of requests arrive at once.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = STARTS_PER_TURN
        """Requests that may still start in this iteration."""

    def add(self, start: Callable[[], None]) -> None:
        """Call a function that starts a request, now or in a later iteration."""
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
    """Table of at most `limit` open connections.

    A connection is busy from the last byte of a request's headers to the last byte of the response. A connection beyond
    the limit replaces the one that has been idle longest, unless a request may be in flight on it: for
    REPLACEABLE_SECONDS or NEW_SECONDS, and while it has unread bytes. A few connections are reserved for refusals and
    health checks.
    """

    def __init__(
        self,
        limit: int,
        interval: float,
        metrics: ConnectionMetrics,
        log: RateLimitedLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty table. interval: seconds between two checks of the deadlines."""
        self.limit = limit
        self.max_requests = limit - max(1, min(_MAX_SPARE, limit // 8))
        """Maximum number of busy connections."""
        self.grace: float | None = None
        """Seconds within which a connection must start its last request; None until the server drains."""
        self.starts = Starts()
        """Starts the requests of all connections."""
        self._interval = interval
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._waiting: OrderedDict[Connection, float] = OrderedDict()
        """Idle connections with the time from which they may be replaced, oldest first."""
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    @property
    def num_requests(self) -> int:
        """Number of busy connections."""
        return len(self._busy)

    def add(self, connection: Connection, successor_of: Connection | None = None) -> None:
        """Add a new connection.

        If the table is full, close the connection that has been idle longest among the replaceable ones, if any.
        successor_of: the entry that the connection replaces, if any.
        """
        if successor_of is not None:
            self.remove(successor_of)
        if len(self) >= self.limit:
            oldest = next(self._replaceable(), None) or next(iter(self._waiting))
            del self._waiting[oldest]
            reason = f"all {self.limit} connections are taken, so the oldest without a request is closed"
            self.report(
                Closed.EVICTED, oldest, f"{reason}; raise --limit-concurrency and ulimit -n if clients need more"
            )
            oldest.evict()
        self._waiting[connection] = self._clock() + NEW_SECONDS

    def room(self, wanted: int) -> int:
        """Return how many connections can be added now, at most `wanted`.

        Connections that may have a request in flight are not closed for them.
        """
        free = self.limit - len(self)
        return free if free >= wanted else min(wanted, free + sum(1 for _ in self._replaceable()))

    def _replaceable(self) -> Iterator[Connection]:
        """Yield replaceable connections, the first one to close first."""
        now = self._clock()
        for connection, replaceable_at in islice(self._waiting.items(), _SCANNED):
            if replaceable_at <= now and not connection.has_unread:
                yield connection

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. Idempotent."""
        self._waiting.pop(connection, None)
        self._busy.discard(connection)

    def claim(self, connection: Connection) -> bool:
        """Mark a connection as busy.

        Return False if too many are.
        """
        if connection not in self._busy:
            if len(self._busy) >= self.max_requests:
                return False
            self._waiting.pop(connection, None)
            self._busy.add(connection)
        return True

    def release(self, connection: Connection) -> None:
        """Mark a connection as idle, unless it was removed."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._waiting[connection] = self._clock() + REPLACEABLE_SECONDS

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
        """Wait until all connections are closed, for at most `timeout` seconds.

        Responses carry `Connection: close`. Idle connections are not closed at once, because a request may be in
        flight: they have `grace` seconds to start their last one.
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
        """Wait until no connection is busy, for at most `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self.num_requests and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_SECONDS)

    async def _check_all(self) -> None:
        loop = asyncio.get_running_loop()
        async for connection in self._in_slices():
            connection.check(loop.time())

    async def _in_slices(self) -> AsyncIterator[Connection]:
        """Yield all connections, a few per event loop iteration."""
        everyone = [*self._waiting, *self._busy]
        for start in range(0, len(everyone), _SLICE):
            for connection in everyone[start : start + _SLICE]:
                yield connection
            await asyncio.sleep(0)


def is_liveness_probe(method: bytes, url: bytes) -> bool:
    """Return True for a request that is served even when too many connections are busy.

    A busy server must not be mistaken for a dead one. The connection can be evicted as if it were idle.
    """
    return method in (b"GET", b"HEAD") and url.partition(b"?")[0].rstrip(b"/") == b"/health/live"
