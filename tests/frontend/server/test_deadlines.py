"""Deadlines of one connection, on a clock and a transport of the test."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tandem.frontend.api.live_stream import WRITER_KEY
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.metrics.frontend_metrics import ConnectionMetrics
from tandem.frontend.server.answer_writer import AnswerWriter
from tandem.frontend.server.connections import Closed, Connections
from tandem.frontend.server.lingering import UNREAD_BYTES, UNREAD_SECONDS
from tandem.frontend.server.protocol import LimitedProtocol
from tandem.protocol.rate_limited_log import RateLimitedLog
from tests.support.raw_http import request

LIMITS = ConnectionLimits()


class Clock:
    """The running event loop, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


class Wire(asyncio.Transport):
    """Transport whose client reads as many bytes as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.waiting = 0
        """Bytes that the client has not read."""
        self.ended = ""

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.ended = "eof"

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def is_closing(self) -> bool:
        return self.ended in ("closed", "aborted")

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Line:
    """One connection to an app; `later` moves its clock and checks its deadlines."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.clock = Clock()
        self.wire = Wire()
        self.registry = CollectorRegistry()
        log = RateLimitedLog(logging.getLogger("deadlines"), at_interval_end=True)
        self.connections = Connections(100, 1.0, ConnectionMetrics(self.registry), log)
        settings = uvicorn.Config(app, interface="asgi3", lifespan="off", log_config=None, timeout_keep_alive=10**6)
        clock: Any = self.clock
        self.protocol = LimitedProtocol(settings, ServerState(), {}, clock, limits=LIMITS, connections=self.connections)
        self.protocol.connection_made(self.wire)

    async def feed(self, data: bytes) -> None:
        self.protocol.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)

    async def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.protocol.check(self.clock.now)
        for _ in range(5):
            await asyncio.sleep(0)

    def counted(self, reason: Closed) -> float:
        name = "tandem_frontend_connections_closed_total"
        return self.registry.get_sample_value(name, {"reason": reason}) or 0.0

    @property
    def status(self) -> int:
        return int(self.wire.written.split()[1])


async def answer(send: Send, status: int = 200) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def read_and_answer(_: Scope, receive: Receive, send: Send) -> None:
    message = {"more_body": True}
    while message.get("more_body") and message.get("type") != "http.disconnect":
        message = await receive()  # type: ignore[assignment]
    await answer(send)


async def refuse(_: Scope, __: Receive, send: Send) -> None:
    await answer(send, 401)


async def wait_for_disconnect(left: asyncio.Event, _: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass
    left.set()


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await story()

    asyncio.run(run())


def test_silent_connection_is_closed_without_an_answer() -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        await line.later(LIMITS.header_timeout - 0.1)
        assert line.wire.ended == ""
        await line.later(0.2)
        assert (line.wire.ended, line.wire.written) == ("closed", b"")
        assert line.counted(Closed.HEADER_TIMEOUT) == 1

    play(story)


@pytest.mark.parametrize("requests_before", [0, 2])
def test_headers_that_take_too_long_are_408(requests_before: int) -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        for _ in range(requests_before):
            await line.feed(request())
            await line.later(50)
        line.wire.written = b""
        for byte in request()[:9]:
            await line.feed(bytes([byte]))
            assert line.wire.ended == ""
            await line.later(1)
        assert line.wire.ended == ""
        await line.later(1.1)
        assert (line.status, line.wire.ended) == (408, "eof")
        assert b'"code":"request_timeout"' in line.wire.written
        assert line.counted(Closed.HEADER_TIMEOUT) == 1
        await line.later(10)
        assert line.wire.ended == "closed"

    play(story)


def test_body_gets_a_second_for_each_16_kib() -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        await line.feed(request("/", "content-length: 10000000", method="POST"))
        for _ in range(100):
            await line.feed(b" " * 16 * 1024)
            await line.later(1)
        assert line.wire.ended == ""
        await line.later(29.9)
        assert line.wire.ended == ""
        await line.feed(b" ")
        await line.later(0.2)
        assert (line.status, line.wire.ended) == (408, "eof")
        assert line.counted(Closed.BODY_TIMEOUT) == 1
        assert line.connections.num_requests == 0

    play(story)


def test_body_that_the_app_does_not_take_is_not_late() -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def busy(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await read_and_answer(scope, receive, send)

        line = Line(busy)
        await line.feed(request("/", "content-length: 200000", method="POST") + b" " * 100_000)
        for _ in range(10):
            await line.later(29)
        assert line.wire.ended == ""
        go.set()
        await line.feed(b"")
        await line.feed(b" " * 100_000)
        assert line.status == 200

    play(story)


def test_answer_may_take_as_long_as_it_likes() -> None:
    async def story() -> None:
        line = Line(partial(wait_for_disconnect, asyncio.Event()))
        await line.feed(request())
        for _ in range(100):
            await line.later(100)
        assert line.wire.ended == ""

    play(story)


def test_idle_connection_is_closed_after_the_keep_alive_timeout() -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        for _ in range(3):
            await line.feed(request())
            await line.later(LIMITS.keep_alive_timeout - 0.1)
            assert line.wire.ended == ""
        await line.later(0.2)
        assert line.wire.ended == "closed"
        line.protocol.timeout_keep_alive_handler()
        assert line.counted(Closed.KEEP_ALIVE_TIMEOUT) == 1, "the server's own timer adds nothing"

    play(story)


def test_client_that_reads_nothing_is_given_up_and_the_app_told() -> None:
    async def story() -> None:
        left = asyncio.Event()
        line = Line(partial(wait_for_disconnect, left))
        await line.feed(request())
        line.wire.waiting = 70_000
        line.protocol.pause_writing()
        await line.later(1)
        for _ in range(50):
            line.wire.waiting -= 10
            await line.later(LIMITS.send_timeout - 1)
        await line.later(LIMITS.send_timeout - 1)
        assert line.wire.ended == "", "a slow client is served"
        await line.later(1.1)
        assert line.wire.ended == "aborted"
        assert line.counted(Closed.SEND_TIMEOUT) == 1
        assert not left.is_set()
        line.protocol.connection_lost(None)
        await line.later(0)
        assert left.is_set()
        assert len(line.connections) == 0

    play(story)


def test_buffer_that_grows_is_given_up_only_if_nothing_leaves_it() -> None:
    async def story() -> None:
        line = Line(partial(wait_for_disconnect, asyncio.Event()))
        await line.feed(request())
        writer: AnswerWriter = cast("Any", line.protocol.cycle.scope)[WRITER_KEY]
        for read in range(1, 11):
            writer.write(b"token")
            line.wire.waiting = writer.num_written - read
            await line.later(LIMITS.send_timeout)
        assert line.wire.ended == "", "a slow client is served"
        for _ in range(2):
            writer.write(b"token")
            line.wire.waiting = writer.num_written - 10
            await line.later(LIMITS.send_timeout / 2)
        assert line.wire.ended == "aborted"

    play(story)


def test_connection_that_cannot_be_flushed_at_its_end_is_aborted() -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        await line.feed(request("/", "connection: close"))
        assert line.wire.ended == "closed"
        line.wire.waiting = 5
        await line.later(1)
        await line.later(LIMITS.send_timeout)
        assert line.wire.ended == "aborted"

    play(story)


def test_rest_of_a_refused_body_is_discarded_within_bounds() -> None:
    async def story() -> None:
        for size, seconds, ended in ((UNREAD_BYTES, 0, ""), (UNREAD_BYTES + 1, 0, "aborted"), (0, 11, "closed")):
            line = Line(refuse)
            await line.feed(request("/", f"content-length: {10 * UNREAD_BYTES}", method="POST"))
            assert (line.status, line.connections.num_requests) == (401, 0)
            await line.feed(b" " * size)
            await line.later(seconds)
            assert line.wire.ended == ended
            assert line.counted(Closed.UNREAD_BODY) == bool(ended)

    play(story)


def test_early_answer_that_ends_the_connection_lets_the_client_finish() -> None:
    async def story() -> None:
        line = Line(refuse)
        await line.feed(request("/", "content-length: 100", "connection: close", method="POST"))
        assert (line.status, line.wire.ended) == (401, "eof")
        await line.feed(b" " * 100)
        assert line.wire.ended == "eof"
        await line.later(UNREAD_SECONDS + 1)
        assert line.wire.ended == "closed"
        assert line.counted(Closed.UNREAD_BODY) == 0

    play(story)


def test_malformed_data_behind_a_request_of_head_is_answered_after_it() -> None:
    async def story() -> None:
        line = Line(refuse)
        line.protocol.data_received(request(method="HEAD"))
        await asyncio.sleep(0)  # the answer is complete, and more data came in the same turn
        await line.feed(b"\x00\r\n\r\n")
        assert [part[:3] for part in line.wire.written.split(b"HTTP/1.1 ")[1:]] == [b"401", b"400"]

    play(story)


def test_malformed_data_behind_an_answer_that_has_begun_only_closes() -> None:
    async def story() -> None:
        left = asyncio.Event()
        line = Line(partial(wait_for_disconnect, left))
        await line.feed(request())
        line.wire.written = b""
        await line.feed(b"what is this\r\n\r\n")
        assert (line.wire.written, line.wire.ended) == (b"", "closed")
        assert left.is_set()

    play(story)


def test_pipelined_request_does_not_hide_a_lost_client_from_the_first() -> None:
    async def story() -> None:
        left = asyncio.Event()
        line = Line(partial(wait_for_disconnect, left))
        await line.feed(request() * 3)
        line.protocol.connection_lost(None)
        await line.later(0)
        assert left.is_set()

    play(story)


def test_shutdown_closes_a_connection_that_lingers() -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        await line.feed(b"what is this\r\n\r\n")
        assert (line.status, line.wire.ended) == (400, "eof")
        line.protocol.shutdown()
        assert line.wire.ended == "closed"

    play(story)
