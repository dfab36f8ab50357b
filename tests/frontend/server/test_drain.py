"""Drain of a server: what it still accepts and answers, how connections end, and when it exits."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from msgspec import structs

from tandem.frontend.server.connections import Closed
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, get, post, until
from tests.frontend.server.test_limits import counted
from tests.support.raw_http import RawClient, request
from tests.support.refusals import numbers_in

MODULE = "tandem.frontend.server.server"
COMPLETION = {"model": "fake-model", "prompt": "one", "max_tokens": 3}


def drain(server: RunningServer, delay: float = 0.0, timeout: float = DEADLINE) -> None:
    """Begin to drain; return once what is open has been told, or during the delay."""
    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(server.server.begin_drain, delay, timeout)
    until(lambda: server.server._service.draining if delay else server.server.connections.grace is not None)


def has_ended(server: RunningServer) -> bool:
    server.thread.join(DEADLINE)
    return not server.thread.is_alive()


def stream_request(max_tokens: int) -> bytes:
    body = json.dumps({**COMPLETION, "max_tokens": max_tokens, "stream": True}).encode()
    headers = ("content-type: application/json", f"content-length: {len(body)}")
    return request("/v1/completions", *headers, method="POST", body=body)


@pytest.fixture
def clients(server: RunningServer) -> Iterator[list[RawClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RawClient(server.sock.getsockname())) for _ in range(3)]


def test_server_is_unready_and_serves_until_the_delay_has_passed(server: RunningServer) -> None:
    drain(server, delay=3600.0)
    refusal = get(server.url + "/health/ready")
    assert (refusal.status_code, refusal.json()["status"]) == (503, "draining")
    reply = post(server.url + "/v1/completions", json=COMPLETION)
    assert reply.status_code == 200
    assert "connection" not in reply.headers


def test_connections_without_a_request_get_one_more(
    server: RunningServer, clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.GRACE_SECONDS", DEADLINE)
    new, kept, sending = clients
    assert kept.send(request()).reply().headers.get("connection") is None
    sending.send(request()[:20])
    until(lambda: len(server.server.connections) == 3)
    drain(server)
    sending.send(request()[20:])
    for client in (new.send(request()), kept.send(request()), sending):
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert client.rest() == b""
    assert has_ended(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=DEADLINE)


def test_connections_that_wait_in_the_queue_are_accepted_and_served(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.GRACE_SECONDS", DEADLINE)
    go = threading.Event()
    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(go.wait, DEADLINE)
    with ExitStack() as stack:
        queued = [stack.enter_context(RawClient(server.sock.getsockname())) for _ in range(100)]
        server.server._loop.call_soon_threadsafe(server.server.begin_drain, 0.0, DEADLINE)
        go.set()
        until(lambda: server.server.connections.grace is not None, "the queue is accepted")
        for client in queued:
            assert client.send(request()).reply().headers["connection"] == "close"
    assert has_ended(server)


def test_idle_connection_is_closed_without_a_reset_after_its_grace(
    server: RunningServer, clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.GRACE_SECONDS", 0.01)
    monkeypatch.setattr("tandem.frontend.server.lingering.REFUSED_SECONDS", DEADLINE)
    idle, *others = clients
    for client in others:
        client.close()
    assert idle.send(request()).reply().status == 200
    until(lambda: len(server.server.connections) == 1)
    drain(server)
    assert idle.socket.recv(1) == b""
    idle.socket.sendall(request())
    assert idle.socket.recv(1) == b"", "what comes too late is discarded"
    assert counted(server, Closed.DRAINED) == 1
    idle.close()
    assert has_ended(server)


def test_running_stream_ends_whole_and_its_connection_gets_one_more_request(
    server: RunningServer, engine: FakeEngine, clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.GRACE_SECONDS", DEADLINE)
    client, *others = clients
    for other in others:
        other.close()
    engine.step_seconds = 0.005
    client.send(stream_request(100))
    assert client.socket.recv(1, socket.MSG_PEEK), "its headers are out"
    drain(server)
    streamed = client.reply()
    assert streamed.headers.get("connection") is None
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in streamed.body
    assert client.send(request()).reply().headers["connection"] == "close"
    assert has_ended(server)


def test_what_is_open_after_the_timeout_ends_with_an_error(
    server: RunningServer, engine: FakeEngine, clients: list[RawClient]
) -> None:
    engine.step_seconds = 0.02
    clients[0].send(stream_request(2000))
    assert clients[0].socket.recv(1, socket.MSG_PEEK)
    drain(server, timeout=0.0)
    assert b'"code":"shutting_down"' in clients[0].reply().body
    assert has_ended(server)
    until(lambda: engine.num_running == 0, "its row is freed")


def test_second_signal_ends_what_is_open_with_an_error_and_exits(
    server: RunningServer, engine: FakeEngine, clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.step_seconds = 0.02
    service = server.server._service
    clients[0].send(stream_request(2000))
    assert clients[0].socket.recv(1, socket.MSG_PEEK)
    service.config = structs.replace(service.config, shutdown_delay=3600.0)
    server.server.handle_exit(signal.SIGTERM, None)
    until(lambda: service.draining)
    monkeypatch.setattr(f"{MODULE}.REPEATED_SIGNAL_SECONDS", 3600.0)
    server.server.handle_exit(signal.SIGTERM, None)
    assert get(server.url + "/health/live").status_code == 200
    assert not server.server.should_exit, "one that follows at once counts as the first"
    monkeypatch.setattr(f"{MODULE}.REPEATED_SIGNAL_SECONDS", -1.0)
    server.server.handle_exit(signal.SIGTERM, None)
    assert b'"code":"shutting_down"' in clients[0].reply().body
    assert has_ended(server)
    assert not server.server.force_exit


def let_pass(server: RunningServer) -> None:
    """Have the last signal be long ago."""
    until(lambda: server.server._signaled_at is not None)
    server.server._signaled_at = -7200.0


def test_third_signal_exits_at_once(
    server: RunningServer, engine: FakeEngine, clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hold = True
    clients[0].send(stream_request(2000))
    until(lambda: server.server._service.client.num_open == 1)
    monkeypatch.setattr(f"{MODULE}.REPEATED_SIGNAL_SECONDS", 3600.0)
    monkeypatch.setattr(server.server.connections, "wait_until_answered", lambda _: asyncio.sleep(3600.0))
    server.server.handle_exit(signal.SIGTERM, None)
    let_pass(server)
    for _ in range(2):
        server.server.handle_exit(signal.SIGTERM, None)
    assert server.server._loop is not None
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.server._loop).result(DEADLINE)
    assert server.server._exit is not None
    assert not server.server.force_exit, "one that follows at once counts as the second"
    let_pass(server)
    server.server.handle_exit(signal.SIGTERM, None)
    until(lambda: server.server.should_exit and server.server.force_exit)
    assert has_ended(server)


def test_sequences_that_the_drain_cuts_are_counted_in_the_log(
    server: RunningServer, engine: FakeEngine, clients: list[RawClient], caplog: pytest.LogCaptureFixture
) -> None:
    engine.hold = True
    for client in clients[:2]:
        client.send(stream_request(100))
    until(lambda: server.server._service.client.num_open == 2, "both run")
    drain(server, timeout=0.0)
    assert has_ended(server)
    (line,) = [line for line in caplog.messages if "--drain-timeout" in line]
    assert numbers_in(line) == [2, 0]
