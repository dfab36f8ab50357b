"""`/admin/scheduler` over a real socket, in front of a fake engine."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from tandem.frontend.access.api_key import Right
from tandem.frontend.api.admin.scheduler import INSPECTION, inspection_body
from tandem.frontend.config import FrontendConfig
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.events import (
    SEQUENCE_STATES,
    InspectedSequence,
    InspectedSession,
    Inspection,
    Limits,
    SequenceState,
    Speculation,
)
from tandem.protocol.stats import EngineStats
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, get, open_stream, post
from tests.frontend.server.test_openapi import answer_schema, body_schema, described
from tests.support.api_keys import make_key, write_keys
from tests.support.shared_frontend import SharedFrontend, shared_fixtures

PATH = "/admin/scheduler"
LIMITS = Limits(max_rows=8, kv_tokens=64, page_size=16, max_step_tokens=64, max_waiting=9)

shared, engine, server = shared_fixtures()


def test_inspection_is_converted_to_json() -> None:
    stats = EngineStats(
        running=1, waiting=3, pages_used=5, pages_total=9, oldest_wait=1.23456, pages_cached=4, prefix_queries=300,
        prefix_hits=100, pages_evicted=6, preemptions=2, sessions=1, sessions_evicted=7, spec_decode_num_drafts=12,
        spec_decode_num_draft_tokens=30, spec_decode_num_accepted_tokens=10,
        spec_decode_num_accepted_tokens_per_pos={"0": 7, "1": 3},
        state_slots=20, state_slots_used=9, states_evicted=3,
    )  # fmt: skip
    running = InspectedSequence(
        *("ab", 5, "decode", 0, 40, 3, 42, 3, 2, 32, -1, 1, 2.34567, "talk"),
        http_request_id="req_1", drafted=9, accepted=4,
    )  # fmt: skip
    waiting = InspectedSequence("ab", 6, "waiting", -1, 40, 0, 0, 0, 0, 0, 0, 0, 1.0, wait=0.5678)
    session = InspectedSession("talk", True, 2, 0.0)
    inspection = Inspection(
        *(1, "fcfs", stats, 4, 1, [running, waiting], [session], 2), speculation=Speculation("ngram", 3, True)
    )
    found = inspection_body(inspection, LIMITS)
    jsonschema.validate(found, INSPECTION)
    assert found == {
        "policy": "fcfs",
        "pause": {"is_paused": False, "status": "running", "mode": None, "new_requests": None},
        "is_sleeping": False,
        "queue": {"waiting": 3, "oldest_wait": 1.235, "unlisted": 2},
        "rows": {"running": 1, "total": 8},
        "pages": {"used": 5, "free": 4, "settling": 1, "total": 9, "page_size": 16},
        "prefix_cache": {
            "pages": 4, "queried_tokens": 300, "hit_tokens": 100, "hit_rate": 0.3333, "evicted_pages": 6,
            "checkpoints": 9, "max_checkpoints": 20, "evicted_checkpoints": 3,
        },
        "speculation": {
            "method": "ngram", "max_drafts": 3, "adaptive": True, "drafts": 12, "drafted_tokens": 30,
            "accepted_tokens": 10, "acceptance_rate": 0.3333, "accepted_tokens_per_position": [7, 3, 0],
        },
        "preemptions": 2,
        "sequences": [
            {
                "client": "ab", "request_id": 5, "state": "decode", "row": 0, "prompt_tokens": 40,
                "generated_tokens": 3, "computed_tokens": 42, "pages": 3, "shared_pages": 2, "cached_tokens": 32,
                "priority": -1, "preemptions": 1, "age": 2.346, "wait": 0.0,
                "session_id": "talk", "http_request_id": "req_1", "key": None, "adapter": None, "drafted_tokens": 9,
                "accepted_tokens": 4,
            },
            {
                "client": "ab", "request_id": 6, "state": "waiting", "row": None, "prompt_tokens": 40,
                "generated_tokens": 0, "computed_tokens": 0, "pages": 0, "shared_pages": 0, "cached_tokens": 0,
                "priority": 0, "preemptions": 0, "age": 1.0, "wait": 0.568,
                "session_id": None, "http_request_id": None, "key": None, "adapter": None, "drafted_tokens": 0,
                "accepted_tokens": 0,
            },
        ],
        "sessions": [{"session_id": "talk", "busy": True, "pages": 2, "idle": 0.0, "key": None}],
        "evicted_sessions": 7,
    }  # fmt: skip
    idle = inspection_body(Inspection(1, "fcfs", EngineStats(), 4, 1, [], []), LIMITS)
    assert idle["prefix_cache"]["hit_rate"] is idle["speculation"] is None
    asleep = inspection_body(Inspection(1, "fcfs", EngineStats(sleeping=1), 4, 1, [], []), LIMITS)
    assert asleep == {**idle, "is_sleeping": True}
    unused = structs.replace(inspection, stats=EngineStats())
    assert inspection_body(unused, LIMITS)["speculation"]["acceptance_rate"] is None


@pytest.mark.parametrize("state", SEQUENCE_STATES)
def test_inspection_schema_describes_every_sequence_state(state: SequenceState) -> None:
    sequence = InspectedSequence("ab", 6, state, -1, 40, 0, 0, 0, 0, 0, 0, 0, 1.0)
    jsonschema.validate(inspection_body(Inspection(1, "fcfs", EngineStats(), 4, 1, [sequence], []), LIMITS), INSPECTION)


def test_inspection_shows_a_turn_in_progress(server: RunningServer, engine: FakeEngine) -> None:
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 1000, "stream": True, "session_id": "talk"}
    headers = {"x-request-id": "ticket 7"}
    with open_stream("POST", server.url + "/v1/completions", json={**body, "priority": 4}, headers=headers):
        engine.hold = True
        response = get(server.url + PATH)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    jsonschema.validate(found, answer_schema(described(server), PATH, "get", 200))
    (one,) = found["sequences"]
    assert (one["session_id"], one["priority"], one["http_request_id"]) == ("talk", 4, "ticket 7")
    assert found["sessions"] == [{"session_id": "talk", "busy": True, "pages": 2, "idle": 0.0, "key": None}]
    assert found["rows"]["total"] == 64


def test_policy_is_changed_in_the_engine(server: RunningServer, engine: FakeEngine) -> None:
    document = described(server)
    for policy in POLICIES:
        response = post(server.url + PATH, json={"policy": policy})
        assert (response.status_code, response.json()) == (200, {"policy": policy})
        jsonschema.validate(response.json(), answer_schema(document, PATH, "post", 200))
        assert engine.policy == policy == get(server.url + PATH).json()["policy"]
        jsonschema.validate({"policy": policy}, body_schema(document, PATH))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"policy": "lottery"}, 400, "policy"), ({"policy": ""}, 400, "policy"), ({"policy": 3}, 400, "policy"),
        ({}, 400, "policy"), ([], 400, None),
    ],
)  # fmt: skip
def test_unknown_policy_is_rejected(
    server: RunningServer, engine: FakeEngine, body: Any, status: int, param: str | None
) -> None:
    response = post(server.url + PATH, json=body)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
    jsonschema.validate(response.json(), answer_schema(described(server), PATH, "post", status))
    assert engine.policy == "fcfs"


def test_scheduler_routes_need_an_api_key_with_the_right_admin(
    engine: FakeEngine, shared: SharedFrontend, tmp_path: Path
) -> None:
    file = write_keys(tmp_path / "keys.toml", make_key("root", rights=(Right.ADMIN,)))
    running = RunningServer(structs.replace(shared.config, api_keys=("key",), api_keys_file=file)).start().ready()
    try:
        assert get(running.url + PATH).status_code == 401
        assert post(running.url + PATH, json={"policy": "priority"}).status_code == 401
        assert engine.policy == "fcfs"
        given = {"authorization": "Bearer key"}
        assert get(running.url + PATH, headers=given).status_code == 403
        assert post(running.url + PATH, json={"policy": "priority"}, headers=given).status_code == 403
        assert engine.policy == "fcfs"
        assert get(running.url + PATH, headers={"authorization": "Bearer root"}).status_code == 200
    finally:
        running.stop()


def test_openapi_describes_both_scheduler_methods(server: RunningServer) -> None:
    operations = described(server)["paths"][PATH]
    assert ("requestBody" in operations["get"], "requestBody" in operations["post"]) == (False, True)


def test_scheduler_routes_are_503_without_an_engine(config: FrontendConfig) -> None:
    running = RunningServer(config).start().alone()
    try:
        for response in (get(running.url + PATH), post(running.url + PATH, json={"policy": "fcfs"})):
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_unavailable"
    finally:
        running.stop()
