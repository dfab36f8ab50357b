"""The right that each route needs."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from msgspec import structs

from tandem.frontend.access.api_key import Right
from tandem.frontend.api.page import page_paths
from tandem.frontend.config import FrontendConfig
from tandem.frontend.server.app import build_routers
from tandem.frontend.server.paths import ROUTE_RIGHTS, is_health_check, required_right, route_label
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, get, post, until
from tests.support.api_keys import bearer, make_key, write_keys


@pytest.fixture
def guarded(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """A server with one key for each right, of the right's name."""
    engine.start()
    file = write_keys(tmp_path / "keys.toml", *(make_key(right.value, rights=(right,)) for right in Right))
    running = (
        RunningServer(structs.replace(config, api_keys_file=file, lora_root=tmp_path, swap_root=tmp_path))
        .start()
        .ready()
    )
    yield running
    running.stop()


def routes(server: RunningServer) -> list[tuple[str, str]]:
    """List the method and path of every route but those that need no key."""
    found = [
        (method, route.path_format)
        for router in build_routers(server.server._service)
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    found.append(("GET", "/openapi.json"))
    return [(method, path) for method, path in found if path not in page_paths() and not is_health_check(path)]


def test_every_route_has_its_row(guarded: RunningServer) -> None:
    assert {route_label(re.sub(r"{.*?}", "x", path)) for _, path in routes(guarded)} == ROUTE_RIGHTS.keys()


def test_every_route_refuses_keys_without_its_right_before_it_reads_anything(guarded: RunningServer) -> None:
    with httpx.Client(base_url=guarded.url, timeout=DEADLINE) as client:
        for method, template in routes(guarded):
            path = re.sub(r"{.*?}", "x", template)
            needed = required_right(path)
            for right in Right:
                response = client.request(method, path, headers=bearer(right.value))
                if needed in (None, right):
                    assert response.status_code not in (401, 403), (method, path, right)
                else:
                    assert response.status_code == 403, (method, path, right)
                    message = response.json()["error"]["message"]
                    assert f"'{right}'" in message and f"'{needed}'" in message and path in message
            assert client.request(method, path).status_code == 401, (method, path)


def test_anthropic_routes_refuse_in_their_own_shape(guarded: RunningServer) -> None:
    refused = post(guarded.url + "/v1/messages", headers={"x-api-key": "metrics"}, json={})
    assert (refused.status_code, refused.json()["type"]) == (403, "error")
    assert refused.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("path", ["/admin/new", "/admin/scheduler/x", "/admin/"])
def test_paths_of_administration_that_do_not_exist_need_its_right(path: str) -> None:
    assert required_right(path) is Right.ADMIN


def test_a_server_without_keys_is_open(server: RunningServer) -> None:
    for path in ("/metrics", "/admin/scheduler", "/v1/models"):
        assert get(server.url + path).status_code == 200


def test_usage_is_counted_by_the_name_of_the_key(guarded: RunningServer) -> None:
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 3}
    usage = post(guarded.url + "/v1/completions", headers=bearer("generate"), json=body).json()["usage"]

    def counted() -> bool:
        text = get(guarded.url + "/metrics", headers=bearer("metrics")).text
        return 'tandem_key_requests_total{key="generate"} 1.0' in text

    until(counted, "the request is counted")
    text = get(guarded.url + "/metrics", headers=bearer("metrics")).text
    assert f'tandem_key_prompt_tokens_total{{key="generate"}} {usage["prompt_tokens"]}.0' in text
    assert f'tandem_key_generation_tokens_total{{key="generate"}} {usage["completion_tokens"]}.0' in text


def test_a_deleted_key_is_refused_and_a_new_one_taken_without_a_restart(guarded: RunningServer, tmp_path: Path) -> None:
    assert get(guarded.url + "/v1/models", headers=bearer("admin")).status_code == 200
    write_keys(tmp_path / "keys.toml", make_key("other"))
    until(lambda: get(guarded.url + "/v1/models", headers=bearer("admin")).status_code == 401, "the key is refused")
    assert get(guarded.url + "/v1/models", headers=bearer("other")).status_code == 200
