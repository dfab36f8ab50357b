"""Operator requests that web pages send, at a server without and with API keys."""

from collections.abc import Callable

import pytest

from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import get, post

OWN = "http://own.example:8000"
OTHER = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
PATHS = ("/admin/pause", "/admin/resume", "/admin/swap", "/sleep?level=2", "/wake_up", "/pause", "/update_weights")


def test_pages_of_other_sites_do_not_operate_a_server(serve: Callable[..., str], engine: FakeEngine) -> None:
    url = serve()
    for path in PATHS:
        answer = post(url + path, headers=OTHER, content="{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site"), path
    assert engine.pause is None
    assert get(url + "/admin/pause", headers=OTHER).status_code == 200, "the browser keeps the answer from the page"
    assert get(url + "/v1/models", headers=OTHER).status_code == 200
    assert post(url + "/admin/resume").status_code == 200


@pytest.mark.parametrize(
    ("headers", "allowed", "is_taken"),
    [
        ({}, (), True),
        ({"origin": OWN, "sec-fetch-site": "same-origin"}, (), True),
        ({"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, (), True),
        ({"origin": OWN}, (), True),
        ({"origin": OWN.upper()}, (), True),
        ({"sec-fetch-site": "none"}, (), True),
        ({"origin": "http://own.example:9000", "sec-fetch-site": "same-site"}, (), False),
        ({"origin": "http://own.example"}, (), False),
        ({"origin": "http://evil.example:8000"}, (), False),
        ({"origin": "null"}, (), False),
        ({"origin": ""}, (), False),
        ({"sec-fetch-site": "cross-site"}, (), False),
        ({"sec-fetch-site": "Cross-Site"}, (), False),
        ({"origin": OWN, "sec-fetch-site": "cross-site"}, (), False),
        ({"origin": "https://app.example", "sec-fetch-site": "cross-site"}, ("https://app.example",), True),
        ({"origin": "https://app.example.evil", "sec-fetch-site": "cross-site"}, ("https://app.example",), False),
        (OTHER, ("*",), True),
    ],
)
def test_the_own_origin_and_allowed_ones_operate(
    serve: Callable[..., str], headers: dict[str, str], allowed: tuple[str, ...], is_taken: bool
) -> None:
    url = serve(cors_origins=allowed)
    answer = post(url + "/admin/resume", headers={"host": "own.example:8000", **headers})
    assert answer.status_code == (200 if is_taken else 403)
