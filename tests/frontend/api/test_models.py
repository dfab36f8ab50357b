"""`/v1/models`, and the names of the model on every route."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.protocol.events import AdapterFacts, AdapterList, WeightFacts
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, post, until
from tests.support.scripted_server import write_chat_model

VERSION = {"anthropic-version": "2023-06-01"}
MESSAGES = [{"role": "user", "content": "one"}]
BODIES = {
    "/v1/completions": {"prompt": "one", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "one", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def named(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    engine.start()
    running = RunningServer(structs.replace(config, served_names=("one", "two"))).start().ready()
    yield running
    running.stop()


@pytest.fixture
def open_to_any(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    engine.start()
    running = RunningServer(structs.replace(config, served_names=("one", "*"))).start().ready()
    yield running
    running.stop()


def test_every_name_is_listed_and_described(named: RunningServer) -> None:
    listed = get(named.url + "/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["one", "two"]
    assert get(named.url + "/v1/models/two").json() == listed[1]
    assert get(named.url + "/v1/models/fake-model").status_code == 404
    in_anthropics_shape = get(named.url + "/v1/models", headers=VERSION).json()
    assert [card["id"] for card in in_anthropics_shape["data"]] == ["one", "two"]
    assert (in_anthropics_shape["first_id"], in_anthropics_shape["last_id"]) == ("one", "two")
    document = get(named.url + "/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["model"]["enum"] == ["one", "two", None]


def test_an_adapter_has_the_version_of_the_weights_that_it_was_loaded_for(
    engine: FakeEngine, named: RunningServer
) -> None:
    adapters = [AdapterFacts("sql", "/sql", 1, weight_version="step-2"), AdapterFacts("poems", "/poems", 2)]
    named.server._service.client.adapters.observe(engine.epoch, AdapterList(1, adapters))
    cards = {card["id"]: card for card in get(named.url + "/v1/models").json()["data"]}
    assert cards["sql"]["weight_version"] == "step-2"
    assert get(named.url + "/v1/models/sql").json() == cards["sql"]
    assert all("weight_version" not in cards[name] for name in ("poems", "one", "two"))


def test_the_model_has_the_version_of_weights_that_can_change(engine: FakeEngine, named: RunningServer) -> None:
    adapters = AdapterList(1, [AdapterFacts("sql", "/sql", 1)])
    named.server._service.client.adapters.observe(engine.epoch, adapters)
    assert all("weight_version" not in card for card in get(named.url + "/v1/models").json()["data"])
    engine.weights = WeightFacts("step-3", "ready")

    def versions() -> dict[str, str | None]:
        return {card["id"]: card.get("weight_version") for card in get(named.url + "/v1/models").json()["data"]}

    until(lambda: versions() == {"one": "step-3", "two": "step-3", "sql": None}, "a heartbeat with the version")
    assert get(named.url + "/v1/models/two").json()["weight_version"] == "step-3"
    assert "weight_version" not in get(named.url + "/v1/models/two", headers=VERSION).json()


@pytest.mark.parametrize("version", ["", "step-2"])
def test_a_draft_model_has_the_version_of_the_weights_that_it_was_loaded_for(
    engine: FakeEngine, config: FrontendConfig, version: str
) -> None:
    engine.facts = structs.replace(engine.facts, draft_model="small", draft_weight_version=version)
    engine.start()
    running = RunningServer(config).start().ready()
    try:
        expected = {"id": "small", **({"weight_version": version} if version else {})}
        assert [card["draft_model"] for card in get(running.url + "/v1/models").json()["data"]] == [expected]
        assert "draft_model" not in get(running.url + "/v1/models", headers=VERSION).json()["data"][0]
    finally:
        running.stop()


def test_every_route_takes_the_names_of_the_model(named: RunningServer) -> None:
    for path, body in BODIES.items():
        for name, status in (("one", 200), ("two", 200), ("fake-model", 404), ("*", 404)):
            response = post(named.url + path, json={**body, "model": name})
            assert response.status_code == status, response.text
            assert response.json().get("model", name) == name


def test_a_request_without_a_model_is_answered_by_the_served_one(named: RunningServer) -> None:
    for path, body in BODIES.items():
        for given in ({}, {"model": None}, {"model": ""}):
            response = post(named.url + path, json={**body, **given})
            if path.startswith("/v1/messages") and given.get("model") is None:
                assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
                assert "model" in response.json()["error"]["message"]
            else:
                assert response.status_code == 200, response.text
                assert response.json().get("model", "one") == "one"


def test_a_star_stands_for_any_name(open_to_any: RunningServer) -> None:
    for path, body in BODIES.items():
        response = post(open_to_any.url + path, json={**body, "model": "claude-opus-4-8"})
        assert response.status_code == 200
        assert response.json().get("model", "claude-opus-4-8") == "claude-opus-4-8"
    assert [card["id"] for card in get(open_to_any.url + "/v1/models").json()["data"]] == ["one"]
    assert get(open_to_any.url + "/v1/models/any/thing").json()["id"] == "any/thing"
    document = get(open_to_any.url + "/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "enum" not in body["properties"]["model"]
