"""The last request of a connection whose server drains, on a clock and a transport of the test."""

import asyncio
from itertools import pairwise

import pytest
from starlette.types import Receive, Scope, Send

from tandem.frontend.server.connections import Closed
from tandem.frontend.server.lingering import REFUSED_SECONDS
from tests.frontend.server.test_deadlines import LIMITS, Line, answer, play, read_and_answer
from tests.support.raw_http import request

GRACE = 5.0
OK = b"HTTP/1.1 200 OK\r\n"
CLOSE = b"connection: close\r\n"


class GatedApp:
    """An app that answers a request when the test says so."""

    def __init__(self) -> None:
        self.gates = [asyncio.Event() for _ in range(4)]
        self.num_begun = 0

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        gate = self.gates[self.num_begun]
        self.num_begun += 1
        await gate.wait()
        await answer(send)


def drain(line: Line) -> None:
    """Begin to drain, as the table of connections does."""
    line.connections.grace = GRACE
    line.protocol.drain(GRACE)


def closings(line: Line) -> list[bool]:
    """Tell of each answer whether its headers announce the end of the connection."""
    starts = [index for index in range(len(line.wire.written)) if line.wire.written.startswith(OK, index)]
    return [CLOSE in line.wire.written[start:end] for start, end in pairwise([*starts, len(line.wire.written)])]


@pytest.mark.parametrize("requests_before", [0, 1])
def test_request_that_comes_within_the_grace_is_the_last(requests_before: int) -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        for _ in range(requests_before):
            await line.feed(request())
        drain(line)
        await line.later(GRACE - 0.1)
        assert line.wire.ended == ""
        await line.feed(request()[:5])
        await line.later(GRACE)
        assert line.wire.ended == "", "a request that has begun gets the usual time"
        await line.feed(request()[5:])
        assert closings(line) == [False] * requests_before + [True]
        assert line.wire.ended == "closed"
        assert line.counted(Closed.DRAINED) == 0

    play(story)


@pytest.mark.parametrize("requests_before", [0, 1])
def test_connection_without_a_request_is_half_closed_after_the_grace(requests_before: int) -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        for _ in range(requests_before):
            await line.feed(request())
        drain(line)
        await line.later(GRACE + 0.1)
        assert (line.wire.ended, line.counted(Closed.DRAINED)) == ("eof", 1)
        await line.feed(request())
        assert closings(line) == [False] * requests_before, "too late"
        await line.later(REFUSED_SECONDS + 0.1)
        assert line.wire.ended == "closed"

    play(story)


def test_grace_does_not_extend_an_earlier_deadline() -> None:
    async def story() -> None:
        line = Line(read_and_answer)
        await line.feed(request())
        await line.later(LIMITS.keep_alive_timeout - 1)
        drain(line)
        await line.later(1.1)
        assert line.wire.ended == "closed"
        assert line.counted(Closed.KEEP_ALIVE_TIMEOUT) == 1

    play(story)


def test_running_request_whose_answer_has_not_begun_is_the_last() -> None:
    async def story() -> None:
        app = GatedApp()
        line = Line(app)
        await line.feed(request())
        drain(line)
        app.gates[0].set()
        await line.feed(b"")
        assert closings(line) == [True]
        assert line.wire.ended == "closed"

    play(story)


@pytest.mark.parametrize("early", [0, 1, 2])
def test_requests_sent_ahead_are_all_answered(early: int) -> None:
    """Some of three have come when the drain begins, the others come while the first one waits for its answer."""

    async def story() -> None:
        app = GatedApp()
        line = Line(app)
        await line.feed(request() * (1 + early))
        drain(line)
        if early < 2:
            await line.feed(request() * (2 - early))
        for gate in app.gates[:3]:
            gate.set()
        for _ in range(5):
            await line.feed(b"")
        assert closings(line) == [False, False, True]
        assert line.wire.ended == "closed"

    play(story)


def test_answer_that_has_begun_leaves_the_connection_for_one_more_request() -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def begun(_: Scope, __: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await go.wait()
            await send({"type": "http.response.body", "body": b"ok"})

        line = Line(begun)
        await line.feed(request())
        drain(line)
        go.set()
        await line.feed(b"")
        assert (closings(line), line.wire.ended) == ([False], "")
        await line.feed(request())
        assert (closings(line), line.wire.ended) == ([False, True], "closed")

    play(story)
