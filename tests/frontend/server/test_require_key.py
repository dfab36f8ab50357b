"""API keys and CORS origins of the HTTP server."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from msgspec import structs
from starlette.types import Receive, Scope, Send

from tandem.frontend.access.api_key import KeyLimits
from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.server.require_key import RequireKey
from tandem.protocol.events import KeyUsage
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import DEADLINE, RunningServer, get, post
from tests.support.api_keys import make_key, write_keys
from tests.support.shared_frontend import shared_frontend

KEYS = ("key-one", "key-two")
BODY = {"model": "fake-model", "prompt": "one", "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(model_dir: Path) -> Iterator[RunningServer]:
    changes = {"api_keys": KEYS, "cors_origins": ("https://a.example",)}
    with shared_frontend(model_dir, lambda config: structs.replace(config, **changes)) as running:
        yield running.server


def test_every_key_opens_every_route(guarded: RunningServer) -> None:
    for key in KEYS:
        assert get(guarded.url + "/v1/models", headers=bearer(key)).status_code == 200
        assert post(guarded.url + "/v1/completions", headers=bearer(key), json=BODY).status_code == 200
    assert get(guarded.url + "/v1/models", headers={"authorization": "bearer   key-one"}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/x", "/metrics", "/version", "/openapi.json", "/nothing", "/healthy", "//health/"]
)
def test_without_a_key_every_route_is_401(guarded: RunningServer, path: str) -> None:
    for headers in (
        {},
        bearer("key-three"),
        {"authorization": "Bearer"},
        {"authorization": "Basic key-one"},
        {"x-api-key": "key-one"},
    ):
        response = get(guarded.url + path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    assert post(guarded.url + path, json=BODY).status_code == 401


def test_a_401_reaches_a_client_that_sends_all_of_its_body_first(guarded: RunningServer) -> None:
    request = urllib.request.Request(guarded.url + "/v1/completions", data=b" " * 2**24, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=DEADLINE)
    with caught.value as answer:
        assert answer.code == 401


def test_two_keys_in_one_request_are_refused(guarded: RunningServer) -> None:
    headers = [("authorization", "Bearer key-one"), ("authorization", "Bearer key-two")]
    assert get(guarded.url + "/v1/models", headers=headers).status_code == 401


def test_health_and_the_page_need_no_key(guarded: RunningServer) -> None:
    for path in ("/health/live", "/health/ready", "/"):
        assert get(guarded.url + path).status_code == 200


def test_cors_allows_a_configured_origin_to_read_refusals(guarded: RunningServer) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
    preflight = httpx.options(guarded.url + "/v1/completions", headers=asked, timeout=DEADLINE)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for headers, status in ((bearer("key-one"), 200), ({}, 401)):
        response = post(guarded.url + "/v1/completions", headers={**headers, "origin": "https://a.example"}, json=BODY)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://a.example"
    other = post(
        guarded.url + "/v1/completions", headers={**bearer("key-one"), "origin": "https://b.example"}, json=BODY
    )
    assert "access-control-allow-origin" not in other.headers


def test_cors_allows_no_origin_by_default(server: RunningServer) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert httpx.options(server.url + "/v1/completions", headers=asked, timeout=DEADLINE).status_code == 405
    response = get(server.url + "/v1/models", headers={"origin": "https://a.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_limits_are_told_only_as_the_engine_told_them_during_the_request(tmp_path: Path) -> None:
    told = {"alice": KeyUsage("alice", 8, 3, 0, 0, 0.0)}
    keys = ApiKeys(file=write_keys(tmp_path / "keys.toml", make_key("alice", limits=KeyLimits(8))))
    keys.load()

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/completions":
            told["alice"] = KeyUsage("alice", 8, 7, 0, 0, 0.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = RequireKey(answer, keys, (), cast("Any", SimpleNamespace(key_usage=told)))

    async def ask(path: str) -> str | None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            response = await client.get(path, headers=bearer("alice"))
            assert response.status_code == 200
            return response.headers.get("x-ratelimit-remaining-requests")

    assert [asyncio.run(ask(path)) for path in ("/tokenize", "/v1/completions", "/tokenize")] == [None, "7", None]
