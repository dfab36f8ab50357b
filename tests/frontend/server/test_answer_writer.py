"""Writes in which an answer leaves, with the parts of a body and without."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem.frontend.server.answer_writer import MAX_JOINED, JoinedHead, join_head
from tests.frontend.conftest import RunningServer
from tests.support.raw_http import RawClient, request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
BODY = {"type": "http.response.body", "body": b"ok"}


class Writes(asyncio.Transport):
    """Transport that keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def answer(
    steps: Callable[[RequestResponseCycle, Writes], Awaitable[None]], method: str = "GET", keep_alive: bool = True
) -> Writes:
    """Run the steps of an answer; return its transport at the end of the next turn of the event loop."""

    async def run() -> Writes:
        transport = Writes()
        scope: Any = {"type": "http", "method": method}
        log = logging.getLogger("test")
        cycle = RequestResponseCycle(
            scope,
            transport,
            FlowControl(transport),
            log,
            log,
            False,
            [],
            asyncio.Event(),
            True,
            keep_alive,
            lambda: None,
        )
        join_head(cycle, transport)
        await steps(cycle, transport)
        await asyncio.sleep(0)
        return transport

    return asyncio.run(run())


async def whole(cycle: RequestResponseCycle, _: Writes) -> None:
    await cycle.send(cast("Any", START))
    await cycle.send(cast("Any", BODY))


async def head_alone(cycle: RequestResponseCycle, _: Writes) -> None:
    await cycle.send(cast("Any", START))


@pytest.mark.parametrize("keep_alive", [True, False])
def test_a_whole_answer_is_one_write(keep_alive: bool) -> None:
    found = answer(whole, keep_alive=keep_alive)
    (written,) = found.writes
    assert written.startswith(b"HTTP/1.1 200") and written.endswith(b"\r\n\r\nok")
    assert found.is_closed is not keep_alive


def test_a_head_whose_body_is_late_is_sent_in_the_same_turn() -> None:
    async def late(cycle: RequestResponseCycle, transport: Writes) -> None:
        await cycle.send(cast("Any", START))
        await asyncio.sleep(0)
        assert transport.writes == [HEAD]
        assert cycle.transport is transport, "later parts are written to it directly"
        await cycle.send(cast("Any", BODY))

    assert answer(late).writes == [HEAD, b"ok"]


@pytest.mark.parametrize("keep_alive", [True, False])
def test_an_answer_to_head_is_sent_without_a_body(keep_alive: bool) -> None:
    found = answer(whole, "HEAD", keep_alive)
    (written,) = found.writes
    assert written.endswith(b"\r\n\r\n") and found.is_closed is not keep_alive


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204)])
def test_the_head_of_a_complete_answer_does_not_wait(method: str, status: int) -> None:
    """What is written next, to the connection itself, belongs to a later request."""

    async def complete(cycle: RequestResponseCycle, transport: Writes) -> None:
        await cycle.send(cast("Any", {**START, "status": status, "headers": []}))
        await cycle.send(cast("Any", {**BODY, "body": b""}))
        assert cycle.response_complete
        assert len(transport.writes) == 1
        transport.write(b"later")

    assert answer(complete, method).writes[1:] == [b"later"]


@pytest.mark.parametrize(("length", "num_writes"), [(MAX_JOINED, 1), (MAX_JOINED + 1, 2)])
def test_a_long_body_is_not_copied(length: int, num_writes: int) -> None:
    body = b"b" * length

    async def long(cycle: RequestResponseCycle, _: Writes) -> None:
        await cycle.send(cast("Any", {**START, "headers": [(b"content-length", b"%d" % length)]}))
        await cycle.send(cast("Any", {**BODY, "body": body}))

    written = answer(long).writes
    assert len(written) == num_writes and b"".join(written).endswith(b"\r\n\r\n" + body)


def test_100_continue_does_not_wait_for_the_answer() -> None:
    async def asked(cycle: RequestResponseCycle, transport: Writes) -> None:
        cycle.more_body = False
        cycle.message_event.set()
        await cycle.receive()
        assert transport.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
        await whole(cycle, transport)

    assert answer(asked).writes[1:] == [HEAD + b"ok"]


def test_a_head_for_a_client_that_has_gone_is_dropped() -> None:
    async def gone(cycle: RequestResponseCycle, transport: Writes) -> None:
        await head_alone(cycle, transport)
        transport.close()

    assert answer(gone).writes == []


def test_an_answer_that_began_before_its_request_ended_keeps_the_transport() -> None:
    async def early(cycle: RequestResponseCycle, transport: Writes) -> None:
        cycle.response_started = True
        join_head(cycle, transport)
        assert not isinstance(cycle.transport, JoinedHead)

    assert answer(early).writes == []


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_of_http_1_0_gets_no_chunks(server: RunningServer, is_stream: bool) -> None:
    fields = {"model": "fake-model", "prompt": "one two", "max_tokens": 3, "stream": is_stream}
    body = json.dumps(fields).encode()
    asked = request("/v1/completions", f"content-length: {len(body)}", method="POST", body=body)
    with RawClient(server.sock.getsockname()) as client:
        head, _, answer = client.send(asked.replace(b"HTTP/1.1", b"HTTP/1.0", 1)).rest().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head and (b"content-length" in head) is not is_stream
    if is_stream:
        events = answer.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
    else:
        assert json.loads(answer)["usage"]["completion_tokens"] == 3
