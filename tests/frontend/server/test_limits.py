"""Limits of sizes and connections, on a real server without an engine."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server.connections import Closed
from tandem.frontend.server.protocol import MAX_PIPELINED
from tests.fakes.tokenizer import write_tokenizer
from tests.frontend.conftest import RunningServer, get, until
from tests.support.raw_http import RawClient, Reply, request

LIMITS = ConnectionLimits(max_connections=8, max_headers_size=2000, max_headers=20, max_url=500, header_timeout=1e6)
POST = "/v1/completions"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tdm-"))
    write_tokenizer(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[RunningServer]:
    """Run a server with small limits of sizes, 8 connections and one API key."""
    config = FrontendConfig(f"ipc://{folder}/e", folder, connections=LIMITS, api_keys=("key",), log_level="warning")
    running = RunningServer(config).start().alone()
    yield running
    running.stop()


def connect(server: RunningServer) -> RawClient:
    return RawClient(server.sock.getsockname())


def counted(server: RunningServer, reason: Closed) -> float:
    metrics = server.server._service.metrics
    return metrics.registry.get_sample_value("tandem_frontend_connections_closed_total", {"reason": reason}) or 0.0


def refused(server: RunningServer, reason: Closed, data: bytes) -> Reply:
    """Send bytes that are refused while another connection is served, and return the answer."""
    before = counted(server, reason)
    with connect(server) as other, connect(server) as client:
        other.send(request()[:10])
        reply = client.send(data).reply()
        assert client.rest() == b""
        assert other.send(request()[10:]).reply().status == 200
    assert reply.headers["connection"] == "close"
    assert reply.headers["x-request-id"].startswith("req_")
    assert counted(server, reason) == before + 1
    until(lambda: len(server.server.connections) == 0, "the connections are forgotten")
    return reply


LONG = "a: " + "b" * 2000


@pytest.mark.parametrize(
    "data",
    [request("/", LONG), request("/", LONG * 2)[:-100], request("/", *["a: " + "b" * 200] * 10),
     b"GET / HTTP/1.1\r\n" + b"a" * 3000, b"\r\n" * 1500],
    ids=["whole", "endless value", "many values", "endless name", "blank lines"],
)  # fmt: skip
def test_headers_beyond_their_size_are_431(strict: RunningServer, data: bytes) -> None:
    reply = refused(strict, Closed.HEADERS_TOO_LARGE, data)
    assert reply.status == 431
    assert (reply.error["code"], reply.error["type"]) == ("headers_too_large", "invalid_request_error")
    assert "exceed 2000 bytes" in reply.error["message"]


@pytest.mark.parametrize("data", [request("/v1/messages", LONG), request("/v1/messages?beta=true", LONG * 2)[:-100]])
def test_headers_beyond_their_size_have_the_error_of_the_api_of_the_path(strict: RunningServer, data: bytes) -> None:
    reply = refused(strict, Closed.HEADERS_TOO_LARGE, data)
    assert reply.status == 431
    body = json.loads(reply.body)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


def test_more_headers_than_the_limit_are_431(strict: RunningServer) -> None:
    reply = refused(strict, Closed.TOO_MANY_HEADERS, request("/", *["a: b"] * 20))
    assert (reply.status, reply.error["code"]) == (431, "too_many_headers")
    with connect(strict) as client:
        assert client.send(request("/health/live", *["a: b"] * 19)).reply().status == 200


@pytest.mark.parametrize("data", [request("/" + "a" * 500), request("/" + "a" * 900)[:700]], ids=["whole", "endless"])
def test_url_beyond_its_length_is_414(strict: RunningServer, data: bytes) -> None:
    reply = refused(strict, Closed.URL_TOO_LONG, data)
    assert (reply.status, reply.error["code"]) == (414, "url_too_long")
    with connect(strict) as client:
        assert client.send(request("/health/live?" + "a" * 480)).reply().status == 200


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nHost: a\r\n"], ids=["none", "two"])
def test_request_without_exactly_one_host_is_400(strict: RunningServer, hosts: bytes) -> None:
    reply = refused(strict, Closed.MALFORMED, b"GET /health/live HTTP/1.1\r\n" + hosts + b"\r\n")
    assert (reply.status, reply.error["code"]) == (400, "invalid_http")
    assert "Host" in reply.error["message"]


def test_http_1_0_needs_no_host(strict: RunningServer) -> None:
    with connect(strict) as client:
        assert client.send(b"GET /health/live HTTP/1.0\r\n\r\n").reply().status == 200


def test_headers_in_small_pieces_are_counted_over_all_of_them(strict: RunningServer) -> None:
    with connect(strict) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\na: ")
        for _ in range(100):
            client.send(b"b" * 30)
        assert client.reply().status == 431


def test_limits_are_per_request_of_a_connection(strict: RunningServer) -> None:
    full = request("/health/live?" + "a" * 400, "a: " + "b" * 1500, *["a: b"] * 15)
    with connect(strict) as client:
        for _ in range(5):
            assert client.send(full).reply().status == 200
        client.send(full * 5)
        assert [client.reply().status for _ in range(5)] == [200] * 5


CHUNKED = ("transfer-encoding: chunked", "authorization: Bearer key")


@pytest.mark.parametrize("tail", [b"0\r\na: " + b"b" * 2100, b"5;a=" + b"b" * 2100], ids=["trailer", "extension"])
def test_endless_lines_between_chunks_are_431(strict: RunningServer, tail: bytes) -> None:
    with connect(strict) as client:
        client.send(request(POST, *CHUNKED, method="POST", body=b"1\r\n{\r\n"))
        until(lambda: len(strict.server._service.pending) == 1, "the app reads the body")
        assert client.send(tail).reply().status == 431
        until(lambda: len(strict.server._service.pending) == 0, "the app gives up")


def test_small_trailers_are_not_headers(strict: RunningServer) -> None:
    body = b"0\r\nauthorization: Bearer key\r\nx: y\r\n\r\n"
    with connect(strict) as client:
        client.send(request(POST, CHUNKED[0], method="POST", body=body))
        assert client.reply().status == 401


def test_clients_that_pipeline_too_many_requests_are_closed(strict: RunningServer) -> None:
    before = counted(strict, Closed.TOO_MANY_PIPELINED)
    with connect(strict) as client:
        assert client.send(request() * 200).rest().count(b"HTTP/1.1 ") <= MAX_PIPELINED
    assert counted(strict, Closed.TOO_MANY_PIPELINED) == before + 1


def test_401_does_not_wait_for_the_body(strict: RunningServer) -> None:
    head = request(POST, "content-length: 100000", method="POST")
    with connect(strict) as client:
        assert client.send(head).reply().status == 401
        until(lambda: strict.server.connections.num_requests == 0, "the request is over")
        client.send(b" " * 100_000 + request())
        assert client.reply().status == 200, "the rest of the body is discarded, the connection goes on"


def test_401_to_a_client_that_expects_100_continue_closes(strict: RunningServer) -> None:
    with connect(strict) as client:
        client.send(request(POST, "content-length: 9", "expect: 100-continue", method="POST"))
        assert client.reply().headers["connection"] == "close"
        assert client.rest() == b""


def test_the_oldest_connection_without_a_request_gives_way(strict: RunningServer) -> None:
    until(lambda: len(strict.server.connections) == 0)
    before = counted(strict, Closed.EVICTED)
    clients = [connect(strict) for _ in range(8)]
    try:
        until(lambda: len(strict.server.connections) == 8)
        clients[0].send(request(POST, "content-length: 5", "authorization: Bearer key", method="POST"))
        until(lambda: strict.server.connections.num_requests == 1)
        assert get(strict.url + "/health/live").status_code == 200
        assert clients[1].rest() == b"", "the second is the oldest without a request"
        assert clients[2].send(request()).reply().status == 200
        assert counted(strict, Closed.EVICTED) == before + 1
    finally:
        for client in clients:
            client.close()


def test_each_request_of_more_clients_than_connections_is_answered(strict: RunningServer) -> None:
    until(lambda: len(strict.server.connections) == 0)
    clients = [connect(strict).send(request("/version", "authorization: Bearer key")) for _ in range(200)]
    try:
        assert {client.reply().status for client in clients} <= {200, 503}
    finally:
        for client in clients:
            client.close()


def test_part_of_a_request_that_gives_way_is_answered(strict: RunningServer) -> None:
    until(lambda: len(strict.server.connections) == 0)
    clients = [connect(strict) for _ in range(8)]
    try:
        until(lambda: len(strict.server.connections) == 8)
        for client in clients:
            client.send(request(POST)[:20])
        assert get(strict.url + "/health/live").status_code == 200
        reply = clients[0].reply()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
        assert clients[0].rest() == b""
    finally:
        for client in clients:
            client.close()


def test_request_is_503_when_all_connections_have_one(strict: RunningServer) -> None:
    until(lambda: len(strict.server.connections) == 0)
    unfinished = request(POST, "content-length: 5", "authorization: Bearer key", method="POST")
    clients = [connect(strict).send(unfinished) for _ in range(strict.server.connections.max_requests)]
    try:
        until(lambda: strict.server.connections.num_requests == 7)
        with connect(strict) as late:
            reply = late.send(request("/version")).reply()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert (reply.error["code"], reply.error["type"]) == ("overloaded", "overloaded_error")
            assert "7 connections" in reply.error["message"]
        for path in ("/health/live", "/health/live/?from=probe"):
            with connect(strict) as probe:
                assert probe.send(request(path)).reply().status == 200
                assert strict.server.connections.num_requests == 7
        clients[0].send(b"12345").reply()
        with connect(strict) as late:
            assert late.send(request("/version", "authorization: Bearer key")).reply().status == 200
    finally:
        for client in clients:
            client.close()


def test_connections_are_a_gauge(strict: RunningServer) -> None:
    with connect(strict) as client:
        client.send(request("/v1/models", "authorization: Bearer key")).reply()
        text = generate_latest(strict.server._service.metrics.registry).decode()
    (line,) = [line for line in text.splitlines() if line.startswith("tandem_frontend_num_connections ")]
    assert float(line.split()[1]) >= 1
