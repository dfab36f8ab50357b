"""Requests for other hosts, through proxies and below a prefix, at a server with a fake engine."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.frontend.server.hosts import trust_proxies
from tests.frontend.conftest import get, post


def test_request_for_another_host_is_refused_in_the_shape_of_its_route(serve: Callable[..., str]) -> None:
    url = serve(allowed_hosts=("loopback",), cors_origins=("*",))
    evil = {"host": "evil.example:8000"}
    for path in ("/", "/v1/models", "/metrics", "/nowhere", "/health/ready"):
        assert get(url + path).status_code == (404 if path == "/nowhere" else 200)
        answer = get(url + path, headers=evil)
        assert answer.status_code == 421
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert "evil.example" in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"]
    answer = post(url + "/v1/messages", headers=evil, json={})
    assert (answer.status_code, answer.json()["type"]) == (421, "error")
    # Probes come by address; everything else has to name a host that is served.
    by_address = {"host": "10.1.2.3:8000"}
    assert get(url + "/health/ready", headers=by_address).status_code == 200
    assert get(url + "/v1/models", headers=by_address).status_code == 421


def test_paths_are_served_with_and_without_the_prefix_of_a_proxy(serve: Callable[..., str]) -> None:
    url = serve(root_path="/tandem")
    for path in ("/v1/models", "/health/live", "/", "/docs"):
        assert get(url + path).status_code == get(url + "/tandem" + path).status_code == 200
    assert get(url + "/tandem").status_code == 200
    assert get(url + "/tandemonium/v1/models").status_code == 404
    assert get(url + "/openapi.json").json()["servers"] == [{"url": "/tandem"}]
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 1}
    assert post(url + "/tandem/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("trusted", "peer", "client", "scheme"),
    [
        (["127.0.0.1"], ("127.0.0.1", 5), "203.0.113.9", "https"),
        (["127.0.0.1"], ("192.0.2.1", 5), "192.0.2.1", "http"),
        (["10.0.0.0/8"], ("10.2.3.4", 5), "203.0.113.9", "https"),
        (["*"], ("192.0.2.1", 5), "198.51.100.1", "https"),
        (["unix"], None, "203.0.113.9", "https"),
        (["127.0.0.1"], None, None, "http"),
    ],
)
def test_headers_of_trusted_proxies_alone_replace_client_and_scheme(
    trusted: list[str], peer: tuple[str, int] | None, client: str | None, scheme: str
) -> None:
    seen: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        seen.append(scope)

    headers = [(b"x-forwarded-for", b"198.51.100.1, 203.0.113.9"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "client": peer, "scheme": "http", "headers": headers}
    unused: Any = None
    with pytest.raises(StopIteration):
        trust_proxies(app, trusted)(scope, unused, unused).__await__().__next__()
    assert (seen[0]["client"] and seen[0]["client"][0], seen[0]["scheme"]) == (client, scheme)
