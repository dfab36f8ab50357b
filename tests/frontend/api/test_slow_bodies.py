"""Requests that are not admitted yet when the server shuts down."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.api.byte_budget import ByteBudget
from tandem.frontend.api.request_body import PendingRequests
from tandem.frontend.config import ChatOptions, FrontendConfig
from tandem.frontend.errors import ApiError
from tandem.frontend.workers import Workers
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, post, until
from tests.support.stopped_process import stop_group

LARGE = 100_000


def drain(server: RunningServer) -> None:
    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(server.server.drain_unasked)


def ended(server: RunningServer) -> None:
    server.thread.join(DEADLINE)
    assert not server.thread.is_alive()


def shutting_down(response: httpx.Response) -> bool:
    error = response.json()["error"]
    told = (response.status_code, error["type"], error["code"], error["message"], response.headers["retry-after"])
    return told == (503, "overloaded_error", "shutting_down", "the server is shutting down", "1")


def pending_requests(budget: ByteBudget) -> PendingRequests:
    return PendingRequests(10**9, Workers(1, "parse"), budget)


def test_shutdown_ends_a_pending_request_and_returns_its_bytes() -> None:
    async def run() -> None:
        budget = ByteBudget(10**9, "bodies")
        pending = pending_requests(budget)

        async def wait(moment: asyncio.Event) -> None:
            with pending.hold() as reservation:
                reservation.grow(LARGE)
                await moment.wait()

        through, never = asyncio.Event(), asyncio.Event()
        first, second = asyncio.create_task(wait(through)), asyncio.create_task(wait(never))
        await asyncio.sleep(0)
        assert (len(pending), budget.used) == (2, 2 * LARGE)
        through.set()
        await first
        pending.end_all()
        with pytest.raises(ApiError) as caught:
            await second
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        assert (len(pending), budget.used) == (0, 0)

    asyncio.run(run())


def test_timeout_within_a_pending_request_is_not_a_shutdown() -> None:
    async def run() -> None:
        with pending_requests(ByteBudget(10**9, "bodies")).hold():
            async with asyncio.timeout(0):
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())


class Waiting:
    """A request that is sent in a thread and waits for its grammar."""

    def __init__(self, server: RunningServer, path: str, fields: dict[str, Any]) -> None:
        self._url = server.url + path
        self._body = {"model": "fake-model", **fields}
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        until(lambda: server.server._service.grammars._compiling, "its grammar is asked for")
        assert len(server.server._service.pending) == 1

    def _send(self) -> None:
        self._answers.append(post(self._url, json=self._body))

    def answer(self) -> httpx.Response:
        self._thread.join(DEADLINE)
        (answer,) = self._answers
        return answer


@pytest.fixture
def chatting(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """Run a server with a chat template."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    engine.start()
    chat = ChatOptions(template=template)
    running = RunningServer(structs.replace(config, chat=chat, drain_timeout=0.1)).start().ready()
    yield running
    running.stop()


@pytest.fixture
def checker(chatting: RunningServer) -> int:
    """Stop the process that compiles grammars, and return its id."""
    body = {"model": "fake-model", "prompt": "a", "max_tokens": 1, "regex": "b"}
    assert post(chatting.url + "/v1/completions", json=body).status_code == 200
    (pid,) = [process.pid for process in chatting.server._service.grammars._processes if process.pid is not None]
    return stop_group(pid)


JSON = {"type": "json_object"}


@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "response_format": JSON}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": JSON}),
        ("/v1/responses", {"input": "a", "text": {"format": JSON}}),
    ],
)
def test_request_waiting_for_its_grammar_is_503_at_shutdown(
    chatting: RunningServer, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    waiting = Waiting(chatting, path, fields)
    drain(chatting)
    assert shutting_down(waiting.answer())
    ended(chatting)
    assert len(engine.submits) == 1


def test_request_admitted_before_the_drain_timeout_is_answered(
    chatting: RunningServer, config: FrontendConfig, checker: int
) -> None:
    service = chatting.server._service
    service.config = structs.replace(config, drain_timeout=DEADLINE)
    waiting = Waiting(chatting, "/v1/completions", {"prompt": "a", "max_tokens": 1, "regex": "c"})
    drain(chatting)
    until(lambda: service.draining)
    os.killpg(checker, signal.SIGCONT)
    assert waiting.answer().status_code == 200
    ended(chatting)


def test_request_with_an_incomplete_body_is_503_at_shutdown(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    with socket.create_connection(server.sock.getsockname(), timeout=DEADLINE) as client:
        client.sendall(head)
        until(lambda: len(server.server._service.pending) == 1)
        drain(server)
        with client.makefile("rb") as answer:
            text = answer.read()
    assert text.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"shutting_down"' in text
    ended(server)
