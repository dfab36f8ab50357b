"""Debian's nginx in front of a real server, with the files of `deploy/nginx`."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_server import Answer, scripted_server
from tests.support.nginx import HAS_IPV6, NGINX, Nginx
from tests.support.serving import GUARD_SECONDS, Serving, free_port, until

NAME = {"host": "llm.example.org"}
BODY: dict[str, Any] = {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "max_tokens": 4}
LONG = {**BODY, "max_tokens": 1000, "ignore_eos": True, "stream": True, "stream_format": "events"}
MEBIBYTE = 2**20

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Nginx]:
    """An nginx with two hosts, of which one does not answer."""
    with Nginx(tmp_path_factory.mktemp("nginx"), [free_port(), serving.port]) as running:
        yield running


def client_of(nginx: Nginx) -> httpx.Client:
    url = f"https://127.0.0.1:{nginx.tls_port}"
    return httpx.Client(base_url=url, headers=NAME, verify=nginx.trust, timeout=GUARD_SECONDS)


@pytest.fixture
def client(nginx: Nginx) -> Iterator[httpx.Client]:
    with client_of(nginx) as client:
        yield client


def generated(serving: Serving) -> int:
    return int(serving.fresh_engine_metric("tandem_generation_tokens_total"))


def tokens(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if '"token_id"' in line)


def test_configuration_has_no_warnings(nginx: Nginx) -> None:
    assert nginx.check() == ""


def test_requests_pass_and_a_host_that_does_not_answer_is_skipped(client: httpx.Client) -> None:
    for _ in range(4):
        reply = client.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 4)


@contextmanager
def paused(serving: Serving, how: str) -> Iterator[None]:
    assert serving.post(f"/admin/pause?{how}", {})[0] == 200
    try:
        yield
    finally:
        assert serving.post("/admin/resume", {})[0] == 200


def test_tandem_itself_refuses_the_name_of_the_service(client: httpx.Client, serving: Serving) -> None:
    assert httpx.get(f"{serving.url}/v1/models", headers=NAME, timeout=GUARD_SECONDS).status_code == 421
    assert client.get("/v1/models").status_code == 200


def test_every_token_of_a_stream_is_passed_on_while_the_engine_stands_still(
    client: httpx.Client, serving: Serving
) -> None:
    def is_paused_in_time() -> bool:
        """Tell whether the engine stood still before the end of the stream."""
        before = generated(serving)
        with client.stream("POST", "/v1/completions", json=LONG) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            until(lambda: generated(serving) > before + 8, "tokens of the stream")
            lines = tokens(reply.iter_lines())
            with paused(serving, "mode=keep"):
                count = generated(serving) - before
                for _ in range(count):
                    next(lines)  # would wait for the engine in vain if nginx held any
            if count < LONG["max_tokens"]:
                next(lines)
        return count < LONG["max_tokens"]

    until(is_paused_in_time, "a pause within a stream")
    until(serving.rows_and_pages_are_free, "the end of the stream")


def test_request_of_a_client_that_leaves_ends(client: httpx.Client, serving: Serving) -> None:
    def leaves_while_it_runs() -> bool:
        with client.stream("POST", "/v1/completions", json=LONG) as reply:
            lines = tokens(reply.iter_lines())  # which closes the answer when it is forgotten
            next(lines)
            return serving.running() == 1

    until(leaves_while_it_runs, "a request that runs when its client leaves")
    until(lambda: serving.running() == 0, "the request's end")


def test_503_passes_with_its_body_and_retry_after(client: httpx.Client, serving: Serving) -> None:
    with paused(serving, "mode=abort&new_requests=refuse"):
        refused, direct = client.post("/v1/completions", json=BODY), serving.post("/v1/completions", BODY)
    assert (refused.status_code, refused.json()) == direct
    assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_answer_of_tandem_passes_unchanged(tmp_path: Path, status: int) -> None:
    body = b'{"error":{"message":"not now"}}'
    headers = {"retry-after": "7", "content-type": "application/json", "x-ratelimit-remaining-tokens": "0"}
    with (
        scripted_server(Answer(status, body, headers)) as upstream,
        Nginx(tmp_path / "nginx", [upstream.server_port] * 2) as nginx,
        client_of(nginx) as client,
    ):
        reply = client.post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.content) == (status, body)
    assert {name: reply.headers[name] for name in headers} == headers
    assert len(upstream.requests) == 1, "it is not sent to a second host"


def test_body_within_the_limit_of_tandem_passes(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={**BODY, "metadata": {"padding": "x" * 24 * MEBIBYTE}})
    assert reply.status_code == 200


def test_body_beyond_the_limit_of_tandem_gets_its_error(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={**BODY, "metadata": {"padding": "x" * 32 * MEBIBYTE}})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert "exceeds 33554432 bytes" in reply.json()["error"]["message"]


def test_body_beyond_the_limit_of_nginx_gets_an_error_in_the_shape_of_the_api(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", content=bytes(34 * MEBIBYTE))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert "exceeds 33 MiB" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/admin/pause", "/admin/scheduler", "/metrics", "/metrics/", "//admin/pause", "/%61dmin/pause", "/v1/../metrics"],
)
def test_paths_of_operators_are_not_passed_on(nginx: Nginx, serving: Serving, path: str) -> None:
    assert serving.metrics()
    connection = http.client.HTTPSConnection("127.0.0.1", nginx.tls_port, context=nginx.trust, timeout=GUARD_SECONDS)
    with contextlib.closing(connection):  # which leaves the path as it is
        connection.request("GET", path, headers=NAME)
        reply = connection.getresponse()
        assert (reply.status, b"nginx" in reply.read()) == (404, True)


def test_other_names_are_refused_and_plain_http_is_redirected(nginx: Nginx) -> None:
    plain = f"http://127.0.0.1:{nginx.port}/v1/models?a=1"
    assert httpx.get(plain, headers={"host": "evil.example"}, timeout=GUARD_SECONDS).status_code == 421
    reply = httpx.get(plain, headers=NAME, timeout=GUARD_SECONDS)
    assert (reply.status_code, reply.headers["location"]) == (308, "https://llm.example.org/v1/models?a=1")
    with client_of(nginx) as client:
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_clients_may_come_by_ipv6(nginx: Nginx) -> None:
    with httpx.Client(base_url=f"https://[::1]:{nginx.tls_port}", verify=nginx.trust, timeout=GUARD_SECONDS) as client:
        assert client.get("/v1/models", headers=NAME).status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421
    reply = httpx.get(f"http://[::1]:{nginx.port}/v1/models", headers=NAME, timeout=GUARD_SECONDS)
    assert (reply.status_code, reply.headers["location"]) == (308, "https://llm.example.org/v1/models")


def test_clients_may_speak_http2(nginx: Nginx) -> None:
    context = nginx.trust
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", nginx.tls_port), GUARD_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        assert secure.selected_alpn_protocol() == "h2"


def test_connections_to_tandem_are_kept_open(nginx: Nginx, serving: Serving) -> None:
    def ports() -> set[int]:
        found = [each for frontend in serving.frontends() for each in frontend.net_connections("tcp")]
        return {peer.raddr.port for peer in found if peer.raddr and peer.laddr.port == serving.port}

    with client_of(nginx) as client:
        assert client.get("/v1/models").status_code == 200
    before = ports()
    assert before
    for _ in range(4):
        with client_of(nginx) as client:  # a connection of its own to nginx
            assert client.get("/v1/models").status_code == 200
    assert ports() <= before


def test_tandem_gets_a_name_it_accepts_and_the_address_of_the_client(tmp_path: Path) -> None:
    with (
        scripted_server(Answer(200)) as upstream,
        Nginx(tmp_path / "nginx", [upstream.server_port]) as nginx,
        client_of(nginx) as client,
    ):
        spoofed = {"x-forwarded-for": "6.6.6.6", "authorization": "Bearer secret", "x-request-id": "my-id"}
        assert client.get("/v1/models", headers=spoofed).status_code == 200
    (seen,) = upstream.headers
    assert seen["host"] == "localhost"
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert (seen["x-forwarded-host"], seen["x-forwarded-proto"]) == ("llm.example.org", "https")
    assert (seen["authorization"], seen["x-request-id"]) == ("Bearer secret", "my-id")


def test_no_frontend_gives_503_in_the_shape_of_the_api(tmp_path: Path) -> None:
    with Nginx(tmp_path / "nginx", [free_port()]) as nginx, client_of(nginx) as client:
        reply = client.post("/v1/completions", content=json.dumps(BODY))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    assert int(reply.headers["retry-after"]) > 0
