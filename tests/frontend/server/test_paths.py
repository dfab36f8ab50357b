"""Paths with a slash at the end, and routes of other servers."""

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.server.paths import missing_route
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, get, post


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/embeddings", "embeddings"), ("/v1/embeddings/", "embeddings"),
        ("/v1/files/file-1/content", "files"), ("/v1/audio/speech", "audio"),
        ("/v1/batches", "`tandem run-batch`"),
        ("/chat/completions", "ends in /v1"),
        (
            "/v1/v1/completions",
            "/v1 is in it twice",
        ),
        ("/v1/nothing", "GET /openapi.json"),
        ("/v1/filesystem", "GET /openapi.json"),
        ("/v1/load_lora_adapter", "--lora-root"),
        ("/v1/unload_lora_adapter", "--lora-root"),
    ],
)  # fmt: skip
def test_missing_route_is_404_and_says_what_is_missing(server: RunningServer, path: str, text: str) -> None:
    response = post(server.url + path, json={"model": "fake-model", "input": "a"})
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert text in error["message"]


def test_long_path_is_not_repeated(server: RunningServer) -> None:
    assert len(error_of(get(server.url + "/v1/" + "x" * 5000))["message"]) < 300
    assert len(missing_route("/models/" + "x" * 5000) or "") < 300


def test_path_may_end_in_a_slash(server: RunningServer) -> None:
    assert get(server.url + "/v1/models/").json() == get(server.url + "/v1/models").json()
    fields = {"model": "fake-model", "prompt": "one", "max_tokens": 2}
    assert post(server.url + "/v1/completions/", json=fields).status_code == 200
    assert 'tandem_http_requests_total{route="/v1/completions",status="200"} 1' in get(server.url + "/metrics/").text


def test_health_needs_no_key(engine: FakeEngine, config: FrontendConfig) -> None:
    engine.start()
    running = RunningServer(structs.replace(config, api_keys=("key",))).start().ready()
    try:
        assert [get(running.url + path).status_code for path in ("/health", "/ping", "/healthy")] == [200, 200, 401]
    finally:
        running.stop()
