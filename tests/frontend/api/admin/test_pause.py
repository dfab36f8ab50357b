"""`/admin/pause` and `/admin/resume` over a real socket, in front of a fake engine."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from tandem.frontend.api.admin.pause import pause_body
from tandem.frontend.engine.calls import pause_of
from tandem.protocol.commands import PAUSE_MODES, Pause, PauseMode
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Inspection, WeightFacts
from tandem.protocol.stats import EngineStats
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, get, post, until
from tests.frontend.server.test_openapi import answer_schema, described
from tests.support.shared_frontend import SharedFrontend, shared_fixtures

PAUSE, RESUME = "/admin/pause", "/admin/resume"
RUNNING = {"is_paused": False, "status": "running", "mode": None, "new_requests": None}

shared, engine, server = shared_fixtures()


@pytest.mark.parametrize(
    ("mode", "refuses", "gauge", "body"),
    [
        (None, False, 0, RUNNING),
        ("keep", False, 0, {"is_paused": False, "status": "pausing", "mode": "keep", "new_requests": "hold"}),
        ("wait", True, 1, {"is_paused": True, "status": "paused", "mode": "wait", "new_requests": "refuse"}),
    ],
)
def test_state_of_an_inspection_is_converted_to_json(
    mode: PauseMode | None, refuses: bool, gauge: int, body: dict[str, Any]
) -> None:
    inspection = Inspection(1, "fcfs", EngineStats(paused=gauge), 0, 0, [], [], 0, mode, refuses)
    assert pause_body(pause_of(inspection)) == body


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_pause_and_resume_are_passed_to_the_engine(server: RunningServer, engine: FakeEngine, mode: PauseMode) -> None:
    document = described(server)
    response = post(f"{server.url}{PAUSE}?mode={mode}&new_requests=refuse")
    expected = {"is_paused": True, "status": "paused", "mode": mode, "new_requests": "refuse"}
    assert (response.status_code, response.json()) == (200, expected)
    assert engine.pause is not None and (engine.pause.mode, engine.pause.refuse_new) == (mode, True)
    assert get(server.url + PAUSE).json() == expected
    for method in ("get", "post"):
        jsonschema.validate(expected, answer_schema(document, PAUSE, method, 200))
    response = post(server.url + RESUME)
    assert (response.status_code, response.json()) == (200, RUNNING)
    assert engine.pause is None
    assert get(server.url + PAUSE).json() == RUNNING


def test_pause_without_parameters_is_that_of_vllm(server: RunningServer, engine: FakeEngine) -> None:
    assert post(server.url + PAUSE).json()["mode"] == "abort"
    assert isinstance(engine.pause, Pause) and not engine.pause.refuse_new


@pytest.mark.parametrize(
    ("query", "param"), [("mode=freeze", "mode"), ("mode=", "mode"), ("new_requests=drop", "new_requests")]
)
def test_other_words_are_400(server: RunningServer, engine: FakeEngine, query: str, param: str) -> None:
    response = post(f"{server.url}{PAUSE}?{query}")
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert engine.pause is None


def test_pause_that_a_resume_overtakes_is_409(server: RunningServer, engine: FakeEngine) -> None:
    engine.resumed_early = True
    response = post(f"{server.url}{PAUSE}?mode=wait")
    assert (response.status_code, error_of(response)["code"]) == (409, "engine_resumed")
    assert "retry-after" not in response.headers


def test_paused_server_is_not_ready_says_why_and_takes_requests_that_wait(
    server: RunningServer, engine: FakeEngine
) -> None:
    post(f"{server.url}{PAUSE}?mode=keep")
    answer = get(server.url + "/health/ready")
    assert answer.status_code == 503
    body = answer.json()
    assert body.keys() == {"status", "reason"} and body["status"] == "paused" and "POST /admin/resume" in body["reason"]
    asked = {"model": "fake-model", "prompt": "abc", "max_tokens": 3, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(post, server.url + "/v1/completions", json=asked)
        until(lambda: engine.num_running == 1, "the request in the engine")
        post(server.url + RESUME)
        assert b"[DONE]" in answered.result().content
    assert get(server.url + "/health/ready").status_code == 200


def test_request_that_a_paused_engine_refuses_has_retry_after(server: RunningServer, engine: FakeEngine) -> None:
    """The failure of a request may come before the heartbeat that reports the pause."""
    engine.refusal = ErrorCode.ENGINE_PAUSED
    body = {"model": "fake-model", "prompt": "x"}
    before = post(server.url + "/v1/completions", json=body)
    post(f"{server.url}{PAUSE}?new_requests=refuse")
    paused = post(server.url + "/v1/completions", json=body)
    assert [(answer.status_code, error_of(answer)["code"]) for answer in (before, paused)] == [
        (503, "engine_paused")
    ] * 2
    assert before.headers["retry-after"] == paused.headers["retry-after"] == "5"
    assert get(server.url + "/health/ready").headers["retry-after"] == "5"


def test_pause_routes_need_an_api_key_with_the_right_admin(engine: FakeEngine, shared: SharedFrontend) -> None:
    running = RunningServer(structs.replace(shared.config, api_keys=("key",))).start().ready()
    try:
        assert [get(running.url + PAUSE).status_code, post(running.url + PAUSE).status_code] == [401, 401]
        assert post(running.url + RESUME).status_code == 401
        for path in (PAUSE, RESUME):
            refused = post(running.url + path, headers={"authorization": "Bearer key"})
            assert (refused.status_code, error_of(refused)["code"]) == (403, "insufficient_permissions")
        assert engine.pause is None
    finally:
        running.stop()


@pytest.mark.parametrize(("mode", "paused"), [(None, False), ("keep", True), ("wait", True)])
def test_reads_are_answered_while_a_long_change_of_the_weights_occupies_the_engine(
    server: RunningServer, engine: FakeEngine, mode: PauseMode | None, paused: bool
) -> None:
    engine.mute, engine.weights = True, WeightFacts("3", "changing")
    if mode is not None:
        engine.pause, engine.stats.paused = Pause(0, mode, False), 1
    assert get(server.url + "/is_paused").json() == {"is_paused": paused}
    status = "paused" if paused else "running"
    assert (get(server.url + PAUSE).json()["status"], get(server.url + PAUSE).json()["mode"]) == (status, mode)
    assert get(server.url + "/is_sleeping").json() == {"is_sleeping": False}
    response = get(server.url + "/admin/scheduler")
    assert (response.status_code, error_of(response)["code"]) == (503, ErrorCode.ENGINE_UNAVAILABLE)
