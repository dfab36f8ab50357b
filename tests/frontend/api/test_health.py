"""The routes of liveness, readiness, models, version and metrics over HTTP."""

import time
from typing import Any

import pytest

from tandem.frontend.api import request_body, request_scope
from tandem.frontend.api.request_body import read_body
from tandem.protocol.events import Phase
from tandem.protocol.version import PROTOCOL_VERSION, distribution_version
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, head, post, until
from tests.support.scrape import value


def test_readiness_describes_the_served_model(server: RunningServer) -> None:
    assert get(server.url + "/health/ready").json() == {
        "status": "ready",
        "model": "fake-model",
        "device": "cpu",
        "dtype": "float32",
        "weights": "fp8",
        "max_len": 2048,
        "kv_tokens": 65536,
    }
    assert get(server.url + "/health/live").json() == {"status": "live"}


def test_health_routes_answer_head_requests(server: RunningServer, engine: FakeEngine) -> None:
    for path in ("/health/live", "/health/ready", "/health", "/ping"):
        response = head(server.url + path)
        assert (response.status_code, response.content) == (200, b"")
    engine.phase = Phase.DRAINING
    until(lambda: head(server.url + "/health/ready").status_code == 503)
    for path in ("/health", "/ping"):
        response = get(server.url + path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json() == get(server.url + "/health/ready").json()


def test_health_of_other_servers_describes_readiness(server: RunningServer) -> None:
    ready = get(server.url + "/health/ready").json()
    assert [get(server.url + path).json() for path in ("/health", "/ping", "/health/")] == [ready] * 3


def test_latency_metrics_start_before_the_body_is_read(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = [1000.0]

    async def read(*arguments: Any) -> bytes:
        earlier[0] = 0.0
        return await read_body(*arguments)

    monkeypatch.setattr(request_scope, "monotonic", lambda: time.monotonic() - earlier[0])
    monkeypatch.setattr(request_body, "read_body", read)
    assert post(server.url + "/v1/completions", json={"model": "fake-model", "prompt": "one"}).status_code == 200
    text = get(server.url + "/metrics").text
    for name in ("tandem_time_to_first_token_seconds", "tandem_e2e_request_latency_seconds"):
        assert value(text, f"{name}_sum") >= 1000


def test_models_route_lists_and_describes_the_served_model(server: RunningServer) -> None:
    listed = get(server.url + "/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card == {
        "id": "fake-model", "object": "model", "created": 1_700_000_000, "owned_by": "tandem", "max_model_len": 2048,
        "default_sampling_params": {},
    }  # fmt: skip
    assert get(server.url + "/v1/models/fake-model").json() == card


def test_version_route_reports_distribution_and_protocol(server: RunningServer) -> None:
    assert get(server.url + "/version").json() == {
        "version": distribution_version(),
        "protocol": PROTOCOL_VERSION,
    }


def test_metrics_count_answered_requests(server: RunningServer) -> None:
    body = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 4, "n": 2}
    assert post(server.url + "/v1/completions", json=body).status_code == 200
    assert post(server.url + "/v1/completions", json={**body, "n": 0}).status_code == 400
    get(server.url + "/made/up/by/a/client")
    lines = get(server.url + "/metrics").text.splitlines()
    for line in (
        'tandem_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'tandem_http_requests_total{route="/v1/completions",status="400"} 1.0',
        'tandem_http_requests_total{route="other",status="404"} 1.0',
        "tandem_frontend_prompt_tokens_total 3.0",
        "tandem_frontend_generation_tokens_total 8.0",
        'tandem_time_to_first_token_seconds_count{model_name="fake-model"} 2.0',
        'tandem_e2e_request_latency_seconds_count{model_name="fake-model"} 1.0',
        "tandem_frontend_engine_connected 1.0",
        "tandem_frontend_num_requests_running 0.0",
    ):
        assert line in lines, line


def test_openapi_document_lists_the_routes(server: RunningServer) -> None:
    paths = get(server.url + "/openapi.json").json()["paths"]
    assert "/v1/completions" in paths
    assert "/health/ready" in paths
