"""Deadlines and slow readers on a real server with short times."""

import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server.connections import Closed
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, until
from tests.frontend.server.test_limits import connect, counted
from tests.support.raw_http import RawClient, request

SHORT = 1.0
"""Seconds of the short times: long enough for a client on a busy machine that does nothing in between."""

Build = Callable[[ConnectionLimits], RunningServer]


@pytest.fixture
def build(engine: FakeEngine, config: FrontendConfig) -> Iterator[Build]:
    """Build servers with small socket buffers; their sockets listen before they start."""
    engine.start()
    built: list[RunningServer] = []

    def make(limits: ConnectionLimits) -> RunningServer:
        running = RunningServer(structs.replace(config, connections=limits))
        running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        built.append(running)
        return running

    yield make
    for running in built:
        running.stop()


def start(server: RunningServer) -> None:
    server.start()
    until(lambda: server.server._service.health().ready, "the engine is connected")


def serves(server: RunningServer) -> bool:
    """Return True if a request is answered; a busy machine may be too slow for the times of this server."""
    try:
        return get(server.url + "/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_clients_that_take_too_long_are_closed_while_others_are_served(build: Build) -> None:
    server = build(ConnectionLimits(header_timeout=SHORT, body_timeout=SHORT, keep_alive_timeout=SHORT))
    post = request("/v1/completions", "content-length: 9", method="POST")
    with connect(server) as silent, connect(server) as slow, connect(server) as lazy, connect(server) as idle:
        # Sent before the server starts, so that it finds all of it when it accepts.
        slow.send(request()[:20])
        lazy.send(post + b"{")
        idle.send(request())
        start(server)
        until(lambda: serves(server), "an ordinary request is answered")
        assert silent.rest() == b""
        assert slow.reply().status == 408
        assert lazy.reply().status == 408
        assert idle.reply().status == 200
        assert slow.rest() == lazy.rest() == idle.rest() == b""
    until(lambda: len(server.server._service.pending) == 0, "the app has given the body up")
    assert counted(server, Closed.HEADER_TIMEOUT) >= 2
    assert counted(server, Closed.BODY_TIMEOUT) == 1
    assert counted(server, Closed.KEEP_ALIVE_TIMEOUT) >= 1
    until(lambda: len(server.server.connections) == 0, "no connection is left")


def test_client_that_never_reads_is_closed_and_its_generation_aborted(build: Build, engine: FakeEngine) -> None:
    server = build(ConnectionLimits(send_timeout=0.2))
    start(server)
    engine.tokens_per_step = 50
    engine.script = lambda submit: [5] * submit.sampling.max_tokens
    body = b'{"model": "fake-model", "prompt": "one", "max_tokens": 2000, "stream": true, "logprobs": 20, "n": 4}'
    head = request("/v1/completions", f"content-length: {len(body)}", method="POST")
    with RawClient(server.sock.getsockname(), receive_buffer=4096) as client:
        client.send(head + body)
        until(lambda: engine.submits, "the request reaches the engine")
        until(lambda: counted(server, Closed.SEND_TIMEOUT) == 1, "the client is given up")
        until(lambda: server.server._service.num_responses == 0, "its generation has ended")
    until(lambda: engine.num_running == 0, "the engine is free")


def test_log_names_the_client_and_the_reason(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    server = build(ConnectionLimits())
    start(server)
    with connect(server) as client:
        client.send(b"what is this\r\n\r\n")
        assert client.reply().status == 400
        host, port = client.socket.getsockname()
    line = f"connection from {host}:{port}: Invalid HTTP request received. (400)"
    until(lambda: line in caplog.messages, caplog.text)
