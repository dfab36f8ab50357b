"""Request ids, and the log and count of responses."""

import logging
import re
import socket

import pytest

from tandem.frontend.api.request_scope import choose_request_id
from tandem.frontend.config import FrontendConfig
from tandem.frontend.server.paths import route_label
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import DEADLINE, RunningServer, get, post, until
from tests.support.shared_frontend import shared_fixtures

BODY = {"model": "fake-model", "prompt": "one", "max_tokens": 2}

shared, engine, server = shared_fixtures()


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
    with caplog.at_level(logging.WARNING, "tandem.frontend.server.access"):
        response = get(server.url + "/v1/models", headers={"x-request-id": "find-me"})
        until(lambda: "failed" in caplog.text)
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "find-me"
    assert error_of(response)["code"] == "internal_error"
    lines = [message for message in caplog.messages if "GET '/v1/models'" in message and "find-me" in message]
    assert [line.startswith("500 ") for line in lines].count(True) == 1 and len(lines) == 2
    assert "ZeroDivisionError" in caplog.text
    assert 'route="/v1/models",status="500"' in get(server.url + "/metrics").text


def test_a_flood_of_503s_is_few_lines_of_the_log(config: FrontendConfig, caplog: pytest.LogCaptureFixture) -> None:
    running = RunningServer(config).start().alone()
    try:
        for _ in range(20):
            assert post(running.url + "/v1/completions", json=BODY).status_code == 503
    finally:
        running.stop()
    lines = [line for line in caplog.messages if line.startswith("503 for POST '/v1/completions', request id req_")]
    assert len(lines) == 1
    assert re.search(r": '[^']*\bheartbeat\b[^']*'$", lines[0])


def test_route_labels_are_bounded() -> None:
    assert route_label("/v1/chat/completions") == "/v1/chat/completions"
    assert route_label("/v1/responses/input_tokens") == "/v1/responses/input_tokens"
    assert route_label("/v1/models/a/b") == "/v1/models/{model}"
    assert route_label("/anything") == route_label("/page/x.js") == "other"


def test_a_bug_in_a_generating_route_is_a_500_with_its_id(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.server._service, "ready", lambda: 1 / 0)
    for path in ("/v1/completions", "/v1/messages"):
        body = {**BODY, "messages": [{"role": "user", "content": "one"}]} if "messages" in path else BODY
        response = post(server.url + path, json=body, headers={"x-request-id": "find-me"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "find-me"
        assert "ZeroDivisionError" in response.text
        until(lambda path=path: f"POST '{path}' failed, request id find-me" in caplog.text)


def test_other_methods_of_a_generating_route_are_not_allowed(server: RunningServer) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert get(server.url + path).status_code == 405
