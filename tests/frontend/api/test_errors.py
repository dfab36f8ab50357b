"""Error responses: every status has the body of the OpenAI API."""

import gzip
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import _STATUS, from_failure
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure, Phase
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, get, until
from tests.frontend.conftest import post as send
from tests.support.refusals import numbers_in


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def post(server: RunningServer, content: bytes = b"", **fields: Any) -> httpx.Response:
    url = server.url + "/v1/completions"
    if content:
        return send(url, content=content)
    return send(url, json={"model": "fake-model", "prompt": "one", **fields})


@pytest.fixture
def small(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    """Run a server that accepts few sequences and small bodies."""
    engine.start()
    running = RunningServer(structs.replace(config, max_concurrent=2, max_body=5000)).start().ready()
    yield running
    running.stop()


def test_every_protocol_error_code_has_a_status() -> None:
    assert set(_STATUS) == set(ErrorCode)
    for code in ErrorCode:
        error = from_failure(Failure(1, code, "text"))
        assert (error.message, error.code) == ("text", code.value)


def test_body_that_is_not_a_json_object_is_400(server: RunningServer) -> None:
    for content in (
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "fake-model", "prompt": "one", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b"nan",
    ):
        response = post(server, content)
        assert response.status_code == 400, content[:20]
        assert error_of(response)["type"] == "invalid_request_error"


def test_prompt_beyond_the_context_is_400_with_the_numbers(server: RunningServer) -> None:
    response = post(server, prompt=[5] * 2040, max_tokens=16)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert numbers_in(error["message"])[:4] == [2048, 2056, 2040, 16]
    assert post(server, prompt=[5] * 2032, max_tokens=16).status_code == 200
    for text in ("one two " * 2000, "x" * 5_000_000):
        response = post(server, prompt=text)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"


def test_empty_prompt_is_400_with_a_remedy(server: RunningServer) -> None:
    for prompt in ("", [], [[]], ["one", ""]):
        response = post(server, prompt=prompt)
        assert response.status_code == 400
        assert error_of(response)["param"] == "prompt"


def test_token_ids_outside_the_vocabulary_are_422(server: RunningServer) -> None:
    for fields, param in (
        ({"prompt": [5, 420]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"stop_token_ids": [420]}, "stop_token_ids"),
        ({"logit_bias": {"420": 1}}, "logit_bias"),
    ):
        response = post(server, **fields)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert "419" in error["message"]


def test_unknown_model_or_path_is_404(server: RunningServer) -> None:
    response = post(server, model="other")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake-model'" in error["message"]
    for path in ("/nowhere", "/v1/models/other/name"):
        response = get(server.url + path)
        assert response.status_code == 404
        error_of(response)


def test_unsupported_method_is_405(server: RunningServer) -> None:
    response = get(server.url + "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    error = error_of(response)
    assert error["code"] == "method_not_allowed" and error["message"].endswith("; use POST")


@pytest.mark.parametrize("announced", [True, False])
def test_oversized_body_is_413(small: RunningServer, announced: bool) -> None:
    parts = [b" " * 1000] * 8
    content: Any = b"".join(parts) if announced else iter(parts)
    response = send(small.url + "/v1/completions", content=content)
    assert response.status_code == 413
    assert "5000 bytes" in error_of(response)["message"]


def test_oversized_body_error_reaches_a_client_that_sends_all_first(small: RunningServer) -> None:
    request = urllib.request.Request(small.url + "/v1/completions", b" " * 16_000_000)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=DEADLINE)
    with caught.value as refusal:
        assert refusal.code == 413
        assert json.load(refusal)["error"]["code"] == "request_too_large"


def test_compressed_body_is_415(server: RunningServer) -> None:
    url, body = server.url + "/v1/completions", b'{"model": "fake-model", "prompt": "one"}'
    response = send(url, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "'gzip'" in error_of(response)["message"]
    assert send(url, content=body, headers={"content-encoding": "identity"}).status_code == 200


def test_invalid_http_is_400_with_an_error_body(server: RunningServer) -> None:
    with socket.create_connection(server.sock.getsockname(), timeout=DEADLINE) as client:
        client.sendall(b"no http at all\r\n\r\n")
        reply = http.client.HTTPResponse(client)
        reply.begin()
        assert (reply.status, reply.getheader("content-type")) == (400, "application/json")
        error = json.loads(reply.read())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


def test_more_sequences_than_the_server_holds_are_422(small: RunningServer, engine: FakeEngine) -> None:
    for fields, param, numbers in (
        ({"n": 3}, "n", [3, 3, 1, 2]),
        ({"prompt": ["one"] * 4}, "prompt", [4, 1, 4, 2]),
    ):
        response = post(small, **fields)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert numbers_in(error["message"]) == numbers
    assert engine.submits == []


def test_too_many_open_sequences_are_429(small: RunningServer, engine: FakeEngine) -> None:
    engine.hold = True
    body = {"model": "fake-model", "prompt": "one"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, small.url + "/v1/completions", json=body)
        until(lambda: engine.num_running == 1, "one sequence is open")
        response = post(small, n=2)
        engine.hold = False
        assert first.result().status_code == 200
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    error = error_of(response)
    assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
    assert numbers_in(error["message"])[:3] == [1, 2, 2]
    assert post(small, n=2).status_code == 200
    assert engine.aborts == []


def test_requests_are_503_with_the_phase_until_the_engine_is_ready(engine: FakeEngine, config: FrontendConfig) -> None:
    running = RunningServer(config).start().alone()
    try:
        response = post(running)
        assert response.status_code == 503
        assert "no heartbeat" in error_of(response)["message"]
        engine.phase, engine.percent, engine.detail = Phase.LOADING, 40, "shard 2 of 5"
        engine.start()
        until(lambda: "40 %" in get(running.url + "/health/ready").text, "the phase is told")
        ready = get(running.url + "/health/ready")
        assert ready.status_code == 503
        body = ready.json()
        assert (body["status"], body["percent"]) == ("loading", 40) and body.keys() == {"status", "percent", "reason"}
        assert body["reason"].endswith(" 40 %: shard 2 of 5")
        response = post(running)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert error_of(response)["code"] == "engine_unavailable"
        assert get(running.url + "/v1/models").status_code == 503
        assert get(running.url + "/health/live").status_code == 200
        engine.phase = Phase.READY
        running.ready()
        assert post(running).status_code == 200
    finally:
        running.stop()


def test_internal_error_is_500_without_details(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("tandem.frontend.api.completions.route.parse_completion", broken)
    response = post(server)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
