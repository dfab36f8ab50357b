"""The document `/openapi.json`: requests and responses of the routes match their schemas."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.protocol.errors import ErrorCode
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_malformed import (
    GENERATING,
    GOOD,
    broken_json,
    chatting,
    out_of_range,
    wrong_requests,
    wrong_types,
)
from tests.frontend.conftest import RunningServer, get, post

__all__ = ("chatting",)


@pytest.fixture
def guarded(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    engine.start()
    running = RunningServer(structs.replace(config, api_keys=("key",))).start().ready()
    yield running
    running.stop()


def described(server: RunningServer, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = get(server.url + "/openapi.json", **more).json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def answer_schema(document: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    response = document["paths"][path][method]["responses"][str(status)]
    schema: dict[str, Any] = response["content"]["application/json"]["schema"]
    return schema


def validate(value: Any, schema: dict[str, Any]) -> None:
    """Check a value without checking the schema itself, which one test does for all of them."""
    jsonschema.Draft202012Validator(schema).validate(value)


def test_every_schema_is_a_valid_json_schema(server: RunningServer) -> None:
    document = described(server)
    schemas = {}
    for method, path, operation in operations(document):
        if "requestBody" in operation:
            body = body_schema(document, path)
            schemas[json.dumps(body)] = body
        for status, response in operation["responses"].items():
            for content in response.get("content", {}).values():
                schemas[json.dumps(content["schema"])] = content["schema"]
            assert "X-Request-Id" in response["headers"], (method, path, status)
    assert len(schemas) > 10
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_document_names_the_served_model(server: RunningServer) -> None:
    document = described(server)
    assert body_schema(document, "/v1/messages")["properties"]["model"]["enum"] == ["fake-model"]
    assert body_schema(document, "/detokenize")["properties"]["model"]["enum"] == ["fake-model", None]
    assert "enum" not in body_schema(document, "/v1/completions")["properties"]["prompt"]["anyOf"][0]


def test_good_requests_and_responses_match_their_schemas(chatting: RunningServer) -> None:
    document = described(chatting)
    for path, fields in GOOD.items():
        validate(fields, body_schema(document, path))
        response = post(chatting.url + path, json=fields)
        assert response.status_code == 200, (path, response.text)
        validate(response.json(), answer_schema(document, path, "post", 200))
    for path in ("/v1/models", "/v1/models/{model}", "/version", "/health/live", "/health/ready"):
        response = get(chatting.url + path.format(model="fake-model"))
        assert response.status_code == 200, (path, response.text)
        validate(response.json(), answer_schema(document, path, "get", 200))
    missing = get(chatting.url + "/v1/models/other")
    assert missing.status_code == 404
    validate(missing.json(), answer_schema(document, "/v1/models/{model}", "get", 404))


def test_rejected_values_do_not_match_the_schema(server: RunningServer) -> None:
    """Check that the document has types and bounds, with which a client can validate its requests."""
    document = described(server)
    for path in GOOD:
        validator = jsonschema.Draft202012Validator(body_schema(document, path))
        for case in (*wrong_types(path, every_sample=True), *out_of_range(path)):
            assert not validator.is_valid(json.loads(case.content)), (path, case.name)


def test_error_responses_match_their_schema(chatting: RunningServer) -> None:
    document = described(chatting)
    for path in GOOD:
        for case in (*broken_json(path, random.Random(1)), *wrong_requests(path)):
            headers = {"content-type": "application/json", **case.headers}
            response = post(chatting.url + path, content=case.content, headers=headers)
            assert response.status_code >= 400, (path, case.name)
            validate(response.json(), answer_schema(document, path, "post", response.status_code))


@pytest.mark.parametrize("path", GENERATING)
def test_every_engine_failure_is_described(
    chatting: RunningServer, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.frontend.generation.retry_budget.MAX_RESUBMISSIONS", 0)
    document = described(chatting)
    for code in ErrorCode:
        engine.refusal = code
        response = post(chatting.url + path, json=GOOD[path])
        assert response.json()["error"]["code"] == code
        validate(response.json(), answer_schema(document, path, "post", response.status_code))


def test_document_asks_for_no_key_without_keys(server: RunningServer) -> None:
    for _, path, operation in operations(described(server)):
        assert "security" not in operation, path
        assert "401" not in operation["responses"], path


def test_document_describes_keys_where_they_are_needed(guarded: RunningServer) -> None:
    with_keys = described(guarded, headers={"authorization": "Bearer key"})
    for _, path, operation in operations(with_keys):
        needed = not path.startswith("/health")
        assert ("security" in operation) == ("401" in operation["responses"]) == needed, path
    assert with_keys["components"]["securitySchemes"]["apiKey"]["scheme"] == "bearer"
