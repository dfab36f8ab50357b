"""Fields without effect, over HTTP: named in a header, counted, or refused on request."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, get, open_stream, post

COMPLETION = {"model": "fake-model", "prompt": "one two", "max_tokens": 3}


@pytest.fixture
def strict(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    engine.start()
    running = RunningServer(structs.replace(config, unknown_fields="refuse", cors_origins=("*",))).start().ready()
    yield running
    running.stop()


def counts(server: RunningServer) -> dict[str, float]:
    found = re.findall(
        r'^tandem_ignored_fields_total\{field="([^"]+)"\} (\S+)$', get(server.url + "/metrics").text, re.M
    )
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/responses", {"model": "fake-model", "input": "x", "max_output_tokens": 3}),
        ("/tokenize", {"prompt": "one"}),
        ("/detokenize", {"tokens": [5]}),
        ("/admin/scheduler", {"policy": "fcfs"}),
    ],
)
def test_every_route_names_ignored_fields(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    response = post(server.url + path, json={**fields, "unheard\n of": 1})
    assert response.headers.get("x-tandem-ignored") == "unheard__of"
    assert "x-tandem-ignored" not in post(server.url + path, json=fields).headers


def test_a_stream_names_ignored_fields(server: RunningServer) -> None:
    body = {**COMPLETION, "stream": True, "unheard": 1, "user": "me"}
    with open_stream("POST", server.url + "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert sorted(response.headers["x-tandem-ignored"].split(",")) == ["unheard", "user"]
        assert b"[DONE]" in response.read()


def test_an_error_names_ignored_fields(server: RunningServer) -> None:
    response = post(server.url + "/v1/completions", json={**COMPLETION, "unheard": 1, "temperature": 9})
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")
    assert response.headers["x-tandem-ignored"] == "unheard"


def test_ignored_fields_are_counted_under_bounded_labels(server: RunningServer) -> None:
    for _ in range(2):
        post(server.url + "/v1/completions", json={**COMPLETION, "service_tier": "flex", "a": 1, "b": 2})
    assert counts(server) == {"service_tier": 2, "other": 2}


def test_refuse_keeps_unknown_fields_out(strict: RunningServer, engine: FakeEngine) -> None:
    response = post(strict.url + "/v1/completions", json={**COMPLETION, "unheard": 1})
    assert (response.status_code, error_of(response)["param"]) == (400, "unheard")
    assert error_of(response)["code"] == "unknown_parameter"
    assert engine.submits == []
    accepted = post(strict.url + "/v1/completions", json={**COMPLETION, "user": "me"})
    assert (accepted.status_code, "x-tandem-ignored" in accepted.headers) == (200, False)
    assert counts(strict) == {}


def test_a_page_of_an_allowed_origin_can_read_the_header(strict: RunningServer) -> None:
    response = post(strict.url + "/v1/completions", json=COMPLETION, headers={"origin": "https://example.org"})
    assert "x-tandem-ignored" in response.headers["access-control-expose-headers"]
