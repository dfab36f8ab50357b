"""API keys, request ids, CORS origins and TLS of the HTTP server."""

import logging
import re
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.server.middleware import choose_request_id, route_label
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import DEADLINE, RunningServer, get, post, until

KEYS = ("key-one", "key-two")
BODY = {"model": "fake-model", "prompt": "one", "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    engine.start()
    running = RunningServer(structs.replace(config, api_keys=KEYS, cors_origins=("https://a.example",)))
    yield running.start().ready()
    running.stop()


def test_every_key_opens_every_route(guarded: RunningServer) -> None:
    for key in KEYS:
        assert get(guarded.url + "/v1/models", headers=bearer(key)).status_code == 200
        assert post(guarded.url + "/v1/completions", headers=bearer(key), json=BODY).status_code == 200
    assert get(guarded.url + "/v1/models", headers={"authorization": "bearer   key-one"}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/x", "/metrics", "/version", "/openapi.json", "/nothing", "/healthy", "//health/"]
)
def test_without_a_key_every_route_is_401(guarded: RunningServer, path: str) -> None:
    for headers in (
        {},
        bearer("key-three"),
        {"authorization": "Bearer"},
        {"authorization": "Basic key-one"},
        {"x-api-key": "key-one"},
    ):
        response = get(guarded.url + path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    assert post(guarded.url + path, json=BODY).status_code == 401


def test_a_401_reaches_a_client_that_sends_all_of_its_body_first(guarded: RunningServer) -> None:
    request = urllib.request.Request(guarded.url + "/v1/completions", data=b" " * 2**24, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=DEADLINE)
    with caught.value as answer:
        assert answer.code == 401


def test_two_keys_in_one_request_are_refused(guarded: RunningServer) -> None:
    headers = [("authorization", "Bearer key-one"), ("authorization", "Bearer key-two")]
    assert get(guarded.url + "/v1/models", headers=headers).status_code == 401


def test_health_and_the_page_need_no_key(guarded: RunningServer) -> None:
    for path in ("/health/live", "/health/ready", "/"):
        assert get(guarded.url + path).status_code == 200


def test_cors_allows_a_configured_origin_to_read_refusals(guarded: RunningServer) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
    preflight = httpx.options(guarded.url + "/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for headers, status in ((bearer("key-one"), 200), ({}, 401)):
        response = post(guarded.url + "/v1/completions", headers={**headers, "origin": "https://a.example"}, json=BODY)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://a.example"
    other = post(
        guarded.url + "/v1/completions", headers={**bearer("key-one"), "origin": "https://b.example"}, json=BODY
    )
    assert "access-control-allow-origin" not in other.headers


def test_cors_allows_no_origin_by_default(server: RunningServer) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert httpx.options(server.url + "/v1/completions", headers=asked).status_code == 405
    response = get(server.url + "/v1/models", headers={"origin": "https://a.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_every_response_has_a_request_id(server: RunningServer) -> None:
    made = [
        get(server.url + "/v1/models"),
        get(server.url + "/nothing"),
        post(server.url + "/v1/completions", json={}),
        post(server.url + "/v1/completions", json={**BODY, "stream": True}),
    ]
    ids = [response.headers["x-request-id"] for response in made]
    assert [response.status_code for response in made] == [200, 404, 400, 200]
    assert all(re.fullmatch("req_[0-9a-f]{32}", own_id) for own_id in ids)
    assert len(set(ids)) == len(ids)


def test_malformed_http_is_answered_with_a_request_id(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(b"what is this\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"x-request-id: req_" in answer


@pytest.mark.parametrize(
    ("given", "kept"),
    [("mine-1", True), ("with blank", True), ("~" * 128, True), ("~" * 129, False), ("", False), ("naïve", False)],
)
def test_a_valid_request_id_is_kept(server: RunningServer, given: str, kept: bool) -> None:
    response = get(server.url + "/v1/models", headers=[(b"x-request-id", given.encode())])
    assert (response.headers["x-request-id"] == given) is kept


def test_the_first_valid_request_id_is_kept() -> None:
    headers = [(b"x-request-id", b"\x01"), (b"x-request-id", b"a"), (b"x-request-id", b"b")]
    assert choose_request_id({"headers": headers}) == b"a"


def test_a_failure_is_logged_with_its_id(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = server.server._service
    monkeypatch.setattr(service, "ready", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, "tandem.frontend.server.middleware"):
        response = get(server.url + "/v1/models", headers={"x-request-id": "find-me"})
        until(lambda: "failed" in caplog.text)
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "find-me"
    assert error_of(response)["code"] == "internal_error"
    assert "500 for GET '/v1/models', request id find-me" in caplog.text
    assert "GET '/v1/models' failed, request id find-me" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert 'route="/v1/models",status="500"' in get(server.url + "/metrics").text


def test_a_flood_of_503s_is_few_lines_of_the_log(config: FrontendConfig, caplog: pytest.LogCaptureFixture) -> None:
    running = RunningServer(config).start()
    try:
        for _ in range(20):
            assert post(running.url + "/v1/completions", json=BODY).status_code == 503
    finally:
        running.stop()
    assert (
        sum(message.startswith("503 for POST '/v1/completions', request id req_") for message in caplog.messages) == 1
    )


def test_route_labels_are_bounded() -> None:
    assert route_label("/v1/chat/completions") == "/v1/chat/completions"
    assert route_label("/v1/models/a/b") == "/v1/models/{model}"
    assert route_label("/anything") == route_label("/page/x.js") == "other"


def test_tls_serves_https(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    engine.start()
    running = RunningServer(structs.replace(config, tls_cert=cert, tls_key=key)).start()
    try:
        url = running.url.replace("http://", "https://")
        trust = ssl.create_default_context(cafile=str(cert))
        until(lambda: httpx.get(url + "/health/ready", verify=trust).status_code == 200)
        with httpx.stream("POST", url + "/v1/completions", json={**BODY, "stream": True}, verify=trust) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            get(running.url + "/health/live")
    finally:
        running.stop()
