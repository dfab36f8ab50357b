"""The routes of sleep and wake over a real socket, in front of a fake engine, and those of requests meanwhile."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.protocol.commands import Sleep, WakeUp
from tandem.protocol.events import Answer
from tandem.protocol.logs import AUDIT_LOGGER
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, post, until
from tests.frontend.server.test_openapi import answer_schema, described
from tests.support.reasoning_model import write_reasoning_model
from tests.support.shared_frontend import SharedFrontend, shared_fixtures


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)


shared, engine, server = shared_fixtures()

ROUTES = ("/sleep", "/wake_up")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("query", "level", "mode"),
    [
        ("", 1, "abort"),
        ("?level=1", 1, "abort"),
        ("?level=2", 2, "abort"),
        ("?level=2&mode=wait", 2, "wait"),
        ("?mode=keep", 1, "keep"),
    ],
)
def test_sleep_has_the_parameters_of_vllm(
    server: RunningServer, engine: FakeEngine, query: str, level: int, mode: str
) -> None:
    response = post(server.url + "/sleep" + query)
    assert (response.status_code, response.content) == (200, b"")
    (sleep,) = engine.sleeps
    assert isinstance(sleep, Sleep) and (sleep.level, sleep.mode) == (level, mode)


@pytest.mark.parametrize(
    ("query", "tags"),
    [
        ("", []),
        ("?tags=", []),
        ("?tags=weights", ["weights"]),
        ("?tags=weights&tags=kv_cache", ["weights", "kv_cache"]),
        ("?tags=kv_cache,weights", ["kv_cache", "weights"]),
        ("?tags=kv_cache,%20kv_cache", ["kv_cache"]),
    ],
)
def test_tags_are_repeated_or_separated_by_commas(
    server: RunningServer, engine: FakeEngine, query: str, tags: list[str]
) -> None:
    response = post(server.url + "/wake_up" + query)
    assert (response.status_code, response.content) == (200, b"")
    (wake,) = engine.sleeps
    assert isinstance(wake, WakeUp) and wake.tags == tags


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=0", "level"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=one", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?mode=stop", "mode"),
        ("/wake_up?tags=graphs", "tags"),
        ("/wake_up?tags=weights,graphs", "tags"),
        ("/wake_up?tags=weights&tags=Weights", "tags"),
    ],
)
def test_other_values_are_refused_by_name(server: RunningServer, engine: FakeEngine, path: str, param: str) -> None:
    response = post(server.url + path)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not engine.sleeps


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("/sleep?levl=2&level=1", "levl"),
        ("/wake_up?tag=weights", "tag"),
        ("/pause?mod=keep&clear_cache=true", "mod"),
        ("/admin/pause?clear_cache=true&mode=keep", "clear_cache"),
        ("/sleep?level=1&mode=wait", None),
        ("/wake_up?tags=weights", None),
    ],
)
def test_parameters_without_effect_are_named(server: RunningServer, path: str, ignored: str | None) -> None:
    response = post(server.url + path)
    assert (response.status_code, response.headers.get("x-tandem-ignored")) == (200, ignored)
    post(server.url + "/resume")


def test_is_sleeping_until_all_is_awake(server: RunningServer) -> None:
    def asked() -> Any:
        response = get(server.url + "/is_sleeping")
        jsonschema.validate(response.json(), answer_schema(described(server), "/is_sleeping", "get", 200))
        return response.json()

    assert asked() == {"is_sleeping": False}
    post(server.url + "/sleep")
    assert asked() == {"is_sleeping": True}
    post(server.url + "/wake_up?tags=weights")
    assert asked() == {"is_sleeping": True}
    post(server.url + "/wake_up?tags=kv_cache")
    assert asked() == {"is_sleeping": False}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("lacks", "status", "code"), [(True, 503, "insufficient_memory"), (False, 409, "sleep_refused")]
)
def test_a_lack_of_memory_is_503_and_other_refusals_are_409(
    server: RunningServer, engine: FakeEngine, path: str, lacks: bool, status: int, code: str
) -> None:
    engine.sleep_refusal = Answer(0, False, "200 bytes are needed, 100 are free", lacks_memory=lacks)
    response = post(server.url + path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["message"] == engine.sleep_refusal.message
    assert ("retry-after" in response.headers) == lacks


def test_a_sleeping_server_is_not_ready_and_says_what_sleeps(server: RunningServer) -> None:
    post(server.url + "/sleep")
    until(lambda: get(server.url + "/health/ready").status_code == 503, "a heartbeat with the sleep")
    response = get(server.url + "/health/ready")
    assert response.json()["status"] == "sleeping" and "kv_cache" in response.json()["reason"]
    assert int(response.headers["retry-after"]) >= 1
    assert get(server.url + "/health/live").status_code == 200
    post(server.url + "/wake_up")
    until(lambda: get(server.url + "/health/ready").status_code == 200, "a heartbeat without it")


PROMPT = {"model": "fake-model", "max_tokens": 4}
CHAT = [{"role": "user", "content": "x"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {**PROMPT, "prompt": "x"},
    "/v1/chat/completions": {**PROMPT, "messages": CHAT},
    "/v1/responses": {"model": "fake-model", "input": "x", "max_output_tokens": 16},
    "/v1/messages": {**PROMPT, "messages": CHAT},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("heard", [False, True])
def test_requests_get_a_503_in_the_shape_of_their_route(
    server: RunningServer, path: str, stream: bool, heard: bool
) -> None:
    """Whether or not the frontend has heard of the sleep."""
    post(server.url + "/sleep")
    if heard:
        until(lambda: get(server.url + "/health/ready").status_code == 503, "a heartbeat with the sleep")
    response = post(server.url + path, json={**REQUESTS[path], "stream": stream})
    if path == "/v1/messages":
        assert response.status_code == 529 and response.json()["error"]["type"] == "overloaded_error"
    else:
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_sleeping"
    assert response.headers["retry-after"] == "5"


def test_what_needs_no_weights_is_answered(server: RunningServer) -> None:
    post(server.url + "/sleep")
    assert get(server.url + "/v1/models").status_code == 200
    assert post(server.url + "/tokenize", json={"model": "fake-model", "prompt": "x"}).status_code == 200


def test_calls_are_in_the_audit_log(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, AUDIT_LOGGER):
        post(server.url + "/sleep?level=2&mode=keep&other=secret")
        post(server.url + "/wake_up?tags=weights")
        post(server.url + "/wake_up")

    def paths() -> list[str]:
        return [record.fields["path"] for record in caplog.records if record.name == AUDIT_LOGGER]  # type: ignore[attr-defined]

    until(lambda: len(paths()) == 3, "three lines")
    assert paths() == ["/sleep?level=2&mode=keep", "/wake_up?tags=weights", "/wake_up"]


@pytest.fixture
def fixed(config: FrontendConfig) -> Iterator[RunningServer]:
    """A server of an engine whose weights cannot change."""
    unchanging = FakeEngine(config.endpoint)
    unchanging.facts = structs.replace(unchanging.facts, weight_transfer="")
    unchanging.start()
    running = RunningServer(config).start().ready()
    yield running
    running.stop()
    unchanging.die()


def test_the_routes_are_404_on_an_engine_that_keeps_its_weights(fixed: RunningServer) -> None:
    for path in ROUTES:
        response = post(fixed.url + path)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "unknown_url")
        assert path in error["message"] and "--enable-weight-updates" in error["message"]
    assert get(fixed.url + "/is_sleeping").status_code == 404


def test_the_routes_need_an_api_key_with_the_right_admin(engine: FakeEngine, shared: SharedFrontend) -> None:
    running = RunningServer(structs.replace(shared.config, api_keys=("key",))).start().ready()
    try:
        for call, path in ((post, "/sleep"), (post, "/wake_up"), (get, "/is_sleeping")):
            assert call(running.url + path).status_code == 401
            assert call(running.url + path, headers={"authorization": "Bearer key"}).status_code == 403
        assert not engine.sleeps
    finally:
        running.stop()
