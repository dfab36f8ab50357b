"""The routes of trainers over a real socket, in front of a fake engine."""

import base64
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from tandem.frontend.api.admin.trainer import vllm_config
from tandem.frontend.api.admin.weight_updates import DEFAULT_BUFFER_BYTES
from tandem.frontend.config import FrontendConfig
from tandem.protocol.commands import FinishWeightUpdate, InitWeightTransfer, StartWeightUpdate, UpdateWeights
from tests.fakes.engine import FakeEngine
from tests.frontend.api.admin.conftest import StartServer
from tests.frontend.conftest import RunningServer, get, post, until
from tests.frontend.server.test_openapi import answer_schema, described
from tests.support.shared_frontend import shared_fixtures

shared, engine, server = shared_fixtures()

CALLS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
INIT = {"master_address": "127.0.0.1", "master_port": 4000, "rank_offset": 1, "world_size": 2}
UPDATE = {"names": ["a", "b"], "dtype_names": ["bfloat16"] * 2, "shapes": [[1, 2], []]}


@pytest.mark.parametrize(
    ("query", "mode", "refuses", "clears"),
    [
        ("", "abort", True, True),
        ("?mode=abort", "abort", True, True),
        ("?mode=wait", "wait", True, True),
        ("?wait_for_inflight_requests=true", "wait", True, True),
        ("?mode=keep", "keep", False, True),
        ("?mode=keep&clear_cache=false", "keep", False, False),
        ("?mode=keep&clear_cache=False", "keep", False, False),
        ("?wait_for_inflight_requests=True", "wait", True, True),
    ],
)
def test_pause_has_the_rules_of_vllm(
    server: RunningServer, engine: FakeEngine, query: str, mode: str, refuses: bool, clears: bool
) -> None:
    assert get(server.url + "/is_paused").json() == {"is_paused": False}
    response = post(server.url + "/pause" + query)
    assert (response.status_code, response.json()) == (200, {"status": "paused"})
    assert engine.pause is not None
    assert (engine.pause.mode, engine.pause.refuse_new, engine.pause.clear_cache) == (mode, refuses, clears)
    assert get(server.url + "/is_paused").json() == {"is_paused": True}
    response = post(server.url + "/resume")
    assert (response.status_code, response.json()) == (200, {"status": "resumed"})
    assert engine.pause is None


@pytest.mark.parametrize(
    ("path", "param"),
    [("/pause?mode=stop", "mode"), ("/pause?clear_cache=maybe", "clear_cache")],
)
def test_other_values_of_a_pause_are_refused_by_name(server: RunningServer, path: str, param: str) -> None:
    response = post(server.url + path)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_server_info_has_what_trainers_read(server: RunningServer, engine: FakeEngine) -> None:
    found = get(server.url + "/server_info?config_format=json").json()["vllm_config"]
    assert found["model_config"] == {
        "dtype": "torch.float32",
        "logprobs_mode": "raw_logprobs",
        "max_model_len": engine.facts.max_len,
    }
    assert found["lora_config"] is None
    assert found["parallel_config"] == {"data_parallel_size": 1}
    assert found["weight_transfer_config"] == {"backend": "gloo"}
    assert get(server.url + "/server_info?config_format=text").status_code == 400
    assert get(server.url + "/get_world_size").json() == {"world_size": 1}


def test_server_info_names_the_limits_of_adapters_and_no_backend_without_updates() -> None:
    facts = FakeEngine("").facts
    found = vllm_config(structs.replace(facts, max_loras=4, max_lora_rank=32, weight_transfer=""))
    assert found["lora_config"] == {"max_lora_rank": 32, "max_loras": 4}
    assert found["weight_transfer_config"] is None


def test_the_prefix_cache_is_reset_unless_requests_hold_it(server: RunningServer) -> None:
    assert post(server.url + "/reset_prefix_cache").json() == {"success": True}


def test_calls_of_an_update_are_passed_to_the_engine(server: RunningServer, engine: FakeEngine) -> None:
    document = described(server)
    bodies: list[Any] = [{"init_info": {**INIT, "packed": True}}, {"is_checkpoint_format": True}]
    bodies += [{"update_info": UPDATE}, {"weight_version": "v7"}]
    for path, body in zip(CALLS, bodies, strict=True):
        response = post(server.url + path, json=body)
        assert response.status_code == 200, response.text
        jsonschema.validate(response.json(), answer_schema(document, path, "post", 200))
    init, start, update, finish = engine.updates
    assert isinstance(init, InitWeightTransfer) and (init.rank, init.world_size) == (1, 2)
    assert (init.address, init.port, init.unique_id) == ("127.0.0.1", 4000, b"")
    assert init.buffer_bytes == DEFAULT_BUFFER_BYTES
    assert isinstance(start, StartWeightUpdate)
    assert isinstance(update, UpdateWeights) and update.buffer_bytes is None
    assert (update.names, update.dtypes, update.shapes) == tuple(UPDATE.values())
    assert isinstance(finish, FinishWeightUpdate) and finish.version == "v7"


def test_an_unpacked_group_has_a_broadcast_for_each_tensor(server: RunningServer, engine: FakeEngine) -> None:
    assert post(server.url + CALLS[0], json={"init_info": INIT}).status_code == 200
    assert post(server.url + CALLS[2], json={"update_info": {**UPDATE, "packed": True}}).status_code == 200
    assert post(server.url + CALLS[2], json={"update_info": {}}).status_code == 200
    assert [command.buffer_bytes for command in engine.updates] == [0, DEFAULT_BUFFER_BYTES, None]  # type: ignore[union-attr]


@pytest.mark.parametrize("given", [{}, INIT])
def test_a_unique_id_replaces_the_address(server: RunningServer, engine: FakeEngine, given: dict[str, Any]) -> None:
    unique_id = bytes(range(128))
    info = {**given, "rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": base64.b64encode(unique_id).decode()}
    assert post(server.url + CALLS[0], json={"init_info": info}).status_code == 200
    (init,) = engine.updates
    assert isinstance(init, InitWeightTransfer) and (init.unique_id, init.address) == (unique_id, "")


def test_an_update_is_finished_without_a_body(server: RunningServer, engine: FakeEngine) -> None:
    assert post(server.url + CALLS[3]).status_code == 200
    (finish,) = engine.updates
    assert isinstance(finish, FinishWeightUpdate) and finish.version == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CALLS[0], {}),
        (CALLS[0], {"init_info": {**INIT, "rank_offset": 2}}),
        (CALLS[0], {"init_info": {**INIT, "rank_offset": 0}}),
        (CALLS[0], {"init_info": {**INIT, "master_port": None}}),
        (CALLS[0], {"init_info": {**INIT, "master_port": 70000}}),
        (CALLS[0], {"init_info": {**INIT, "nccl_unique_id_b64": "AAAA"}}),
        (CALLS[0], {"init_info": {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "AAAA"}}),
        (CALLS[0], {"init_info": {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "?"}}),
        (CALLS[0], {"init_info": {**INIT, "packed_buffer_size_bytes": 0}}),
        (CALLS[0], {"init_info": {**INIT, "world_size": 2**62}}),
        (CALLS[2], {}),
        (CALLS[2], {"update_info": {**UPDATE, "shapes": [[2**70], [1]]}}),
        (CALLS[2], {"update_info": {**UPDATE, "shapes": [[-1], [1]]}}),
        (CALLS[2], {"update_info": {**UPDATE, "shapes": [[1]]}}),
        (CALLS[2], {"update_info": {**UPDATE, "names": [1, 2]}}),
        (CALLS[2], {"update_info": []}),
        (CALLS[3], {"weight_version": "x" * 257}),
        (CALLS[3], {"weight_version": "step\n7"}),
        (CALLS[3], {"weight_version": 7}),
    ],
)
def test_bodies_that_are_not_valid_are_refused(
    server: RunningServer, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.is_receiving = True  # A refusal does not wait for an engine that is busy.
    assert post(server.url + path, json=body).status_code == 400
    if path == CALLS[2]:  # The engine may have to close the group.
        until(lambda: engine.updates)
        (command,) = engine.updates
        assert isinstance(command, UpdateWeights) and command.is_refused
    else:
        assert not engine.updates


@pytest.mark.parametrize("path", CALLS)
def test_a_call_that_fails_in_the_engine_is_a_409(server: RunningServer, engine: FakeEngine, path: str) -> None:
    engine.update_problem = "the trainer is gone"
    response = post(server.url + path, json={"init_info": INIT, "update_info": UPDATE})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "weight_update_failed"
    assert response.json()["error"]["message"] == "the trainer is gone"
    assert "retry-after" not in response.headers


@pytest.fixture
def fixed(start_server: StartServer, config: FrontendConfig) -> RunningServer:
    """A server of an engine with fixed weights."""
    unchanging = FakeEngine(config.endpoint)
    unchanging.facts = structs.replace(unchanging.facts, weight_transfer="")
    return start_server(unchanging, config)


@pytest.mark.parametrize("path", CALLS)
def test_the_routes_are_404_without_updates(fixed: RunningServer, path: str) -> None:
    assert post(fixed.url + path, json={"init_info": INIT, "update_info": UPDATE}).status_code == 404
