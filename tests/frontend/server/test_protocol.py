"""Requests that offer another protocol (`upgrade`), and health checks of a busy server, without an engine."""

import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.frontend.config import FrontendConfig
from tandem.frontend.server.connections import STARTS_PER_TURN
from tandem.frontend.server.protocol import LimitedProtocol
from tests.fakes.tokenizer import write_tokenizer
from tests.frontend.conftest import RunningServer, until
from tests.support.raw_http import RawClient, request

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")
"""What the HTTP client of Java sends with every request by default, and `curl --http2`."""
HIDDEN = request("/hidden")
"""A request within a body."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    folder = Path(tempfile.mkdtemp(prefix="tdm-"))
    write_tokenizer(folder)
    running = RunningServer(FrontendConfig(f"ipc://{folder}/e", folder, log_level="warning")).start().alone()
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.sock.getsockname()) as connected:
        yield connected


def post(*headers: str) -> bytes:
    return request("/tokenize", "content-type: application/json", *H2C, *headers, method="POST")


BODY = b'{"prompt": {"abc": "def"}}'
LENGTH = f"content-length: {len(BODY)}"
CHUNKED = "transfer-encoding: chunked"


@pytest.mark.parametrize(
    ("head", "body"),
    [(post(LENGTH), BODY), (post(CHUNKED), b"8\r\n%b\r\n12\r\n%b\r\n0\r\nx: y\r\n\r\n" % (BODY[:8], BODY[8:]))],
    ids=["length", "chunked"],
)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_body_of_a_request_that_offers_h2c_is_read(client: RawClient, head: bytes, body: bytes, parts: int) -> None:
    data = head + body + request()
    cuts = [0, *(len(head) + len(body) * part // parts for part in range(parts)), len(data)]
    for start, end in pairwise(cuts):
        client.send(data[start:end])
    reply = client.reply()
    assert (reply.status, reply.error["param"]) == (400, "prompt"), reply
    assert client.reply().status == 200, "the next request follows the body"


def test_body_of_a_request_that_offers_h2c_is_no_request(server: RunningServer, client: RawClient) -> None:
    client.send(post(f"content-length: {len(HIDDEN)}"))
    until(lambda: server.server.connections.num_requests == 1, "the headers have arrived")
    client.send(HIDDEN + request())
    assert client.reply().status == 400, "the body is not JSON"
    assert client.reply().status == 200, "and nothing in it was answered"


def test_requests_without_a_body_that_offer_h2c_are_answered_in_turn(client: RawClient) -> None:
    client.send(request("/health/live", *H2C) * 3 + post("content-length: 0") + request("/nowhere"))
    assert [client.reply().status for _ in range(5)] == [200, 200, 200, 400, 404]


def test_limits_hold_within_the_body_of_a_request_that_offers_h2c(server: RunningServer, client: RawClient) -> None:
    client.send(post(CHUNKED) + b"1\r\n{\r\n")
    until(lambda: server.server.connections.num_requests == 1, "the headers have arrived")
    client.send(b"1;a=" + b"b" * 70_000)
    assert client.reply().status == 431


def test_health_checks_do_not_wait_for_the_starts_of_other_requests(server: RunningServer, client: RawClient) -> None:
    starts = server.server.connections.starts
    starts._left = 0  # as in a turn in which as many as may have begun, and which does not end
    try:
        client.send(request("/version"))
        until(lambda: len(starts._waiting) == 1, "a request waits for its start")
        for path, status in (("/health/live", 200), ("/health/ready", 503), ("/health", 503), ("/ping", 503)):
            with RawClient(server.sock.getsockname()) as probe:
                assert probe.send(request(path)).reply().status == status
        assert len(starts._waiting) == 1
    finally:
        starts._left = STARTS_PER_TURN
    with RawClient(server.sock.getsockname()) as other:
        assert other.send(request("/version")).reply().status == 200
    assert client.reply().status == 200, "the next turn has come"


@pytest.mark.parametrize(
    "name",
    [
        *("connection_made", "connection_lost", "data_received", "resume_writing", "shutdown"),
        *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
        *("_start_asgi_task", "on_response_complete", "timeout_keep_alive_handler"),
    ],
)
def test_hook_of_uvicorn_that_is_overridden_exists(name: str) -> None:
    """One that uvicorn no longer calls would silently never run."""
    assert name in vars(LimitedProtocol)
    assert name in vars(HttpToolsProtocol)
