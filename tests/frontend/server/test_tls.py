"""TLS connections: handshakes count, give way, and end."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server.connections import Closed
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, get, until
from tests.frontend.server.test_limits import connect, counted
from tests.support.certificate import write_certificate
from tests.support.raw_http import request

LIMITS = ConnectionLimits(max_connections=4, header_timeout=DEADLINE)


@pytest.fixture
def secure(config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """Run a server with TLS and 4 connections, without an engine."""
    cert, key = write_certificate(tmp_path)
    running = RunningServer(structs.replace(config, tls_cert=cert, tls_key=key, connections=LIMITS)).start()
    yield running
    running.stop()


def trust(server: RunningServer) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(server.server._service.config.tls_cert))


def live(server: RunningServer) -> int:
    return httpx.get(
        server.url.replace("http", "https") + "/health/live", verify=trust(server), timeout=DEADLINE
    ).status_code


def test_silent_handshakes_give_way_to_a_client_that_speaks(secure: RunningServer) -> None:
    silent = [connect(secure) for _ in range(4)]
    try:
        until(lambda: len(secure.server.connections) == 4, "handshakes are connections")
        assert live(secure) == 200
        assert silent[0].rest() == b"", "the oldest gave way"
        assert counted(secure, Closed.EVICTED) == 1
        silent[3].send(b"x" * 100)
        until(lambda: counted(secure, Closed.HANDSHAKE) == 1, "what is not TLS is refused")
    finally:
        for client in silent:
            client.close()
    until(lambda: len(secure.server.connections) == 0, "nothing is left")
    assert live(secure) == 200


def test_handshakes_leave_no_descriptor_behind(secure: RunningServer) -> None:
    assert live(secure) == 200
    until(lambda: len(secure.server.connections) == 0)
    before = psutil.Process().num_fds()
    for _ in range(3):
        silent = [connect(secure) for _ in range(20)]
        for client in silent:
            client.close()
    assert live(secure) == 200
    until(lambda: len(secure.server.connections) == 0)
    until(lambda: psutil.Process().num_fds() <= before, "all are closed")


def test_request_that_comes_with_the_end_of_the_handshake_is_answered(secure: RunningServer) -> None:
    for _ in range(5):
        plain = socket.create_connection(secure.sock.getsockname(), timeout=DEADLINE)
        with trust(secure).wrap_socket(plain, server_hostname="127.0.0.1") as client:
            client.sendall(request("/health/live", "connection: close"))
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_handshake_that_takes_too_long_is_closed(secure: RunningServer) -> None:
    service = secure.server._service
    service.config = structs.replace(service.config, connections=structs.replace(LIMITS, header_timeout=0.05))
    with connect(secure) as silent:
        assert silent.rest() == b""
    until(lambda: counted(secure, Closed.HANDSHAKE) == 1)


def test_shutdown_ends_handshakes(secure: RunningServer) -> None:
    with connect(secure) as silent:
        until(lambda: len(secure.server.connections) == 1)
        secure.server.should_exit = True
        assert silent.rest() == b""


def test_drain_ends_handshakes_that_do_not_go_on(secure: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.frontend.server.server.GRACE_SECONDS", 0.01)
    with connect(secure) as silent:
        until(lambda: len(secure.server.connections) == 1, "a handshake counts")
        assert secure.server._loop is not None
        secure.server._loop.call_soon_threadsafe(secure.server.begin_drain, 0.0, DEADLINE)
        assert silent.rest() == b""
    secure.thread.join(DEADLINE)
    assert not secure.thread.is_alive()


def test_answer_during_a_drain_ends_a_tls_connection(secure: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.frontend.server.server.GRACE_SECONDS", DEADLINE)
    plain = socket.create_connection(secure.sock.getsockname(), timeout=DEADLINE)
    with trust(secure).wrap_socket(plain, server_hostname="127.0.0.1") as client:
        until(lambda: len(secure.server.connections) == 1)
        assert secure.server._loop is not None
        secure.server._loop.call_soon_threadsafe(secure.server.begin_drain, 0.0, DEADLINE)
        until(lambda: secure.server.connections.grace is not None)
        client.sendall(request())
        answer = b""
        while data := client.recv(1000):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in answer
    secure.thread.join(DEADLINE)
    assert not secure.thread.is_alive()


def test_client_that_gives_up_a_handshake_is_counted_and_not_logged(
    secure: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    connect(secure).close()
    until(lambda: counted(secure, Closed.HANDSHAKE) == 1)
    # The exporter of an earlier test's server may still try to reach its collector.
    assert [record for record in caplog.records if not record.name.startswith("opentelemetry")] == []


def test_tls_serves_https(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    engine.start()
    running = RunningServer(structs.replace(config, tls_cert=cert, tls_key=key)).start()
    try:
        url = running.url.replace("http://", "https://")
        context = ssl.create_default_context(cafile=str(cert))
        until(lambda: httpx.get(url + "/health/ready", verify=context, timeout=DEADLINE).status_code == 200)
        with httpx.stream(
            "POST",
            url + "/v1/completions",
            json={"model": "fake-model", "prompt": "one", "max_tokens": 2, "stream": True},
            verify=context,
            timeout=DEADLINE,
        ) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            get(running.url + "/health/live")
    finally:
        running.stop()
