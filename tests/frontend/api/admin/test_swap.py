"""Who may swap weights, from where, and which folders."""

import asyncio
import logging
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from tandem.frontend.api.admin import adapters, swap
from tandem.frontend.api.admin.swap import SwapRequest, checkpoint_below, parse_swap
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.events import SwapFacts, WeightFacts
from tandem.protocol.logs import AUDIT_LOGGER
from tests.fakes.engine import FakeEngine
from tests.frontend.api.admin.conftest import StartServer
from tests.frontend.conftest import get, post, until

SWAP = "/admin/swap"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"path": 1}',
        b'{"path": ""}',
        b'{"path": "a", "running": "never"}',
        b'{"path": "a", "grace": -1}',
        b'{"path": "a", "grace": "1"}',
        b'{"path": "a", "activate": 1}',
        b'{"path": "a", "version": "%s"}' % (b"x" * 300),
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_swap(body, IgnoredFields())
    assert caught.value.status == 400


def test_fields_have_defaults() -> None:
    assert parse_swap(b'{"path": "a"}', IgnoredFields()) == SwapRequest("a")
    body = b'{"path": "a", "running": "restart", "grace": 2, "activate": false, "version": "v"}'
    assert parse_swap(body, IgnoredFields()) == SwapRequest("a", "restart", 2.0, False, "v")


def test_a_checkpoint_is_below_the_root_with_all_links_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "a", root / "links", root / "pickles", outside):
        folder.mkdir(parents=True)
    (root / "a" / "model.safetensors").touch()
    (outside / "model.safetensors").touch()
    (root / "pickles" / "model.bin").touch()
    (root / "link").symlink_to(outside)
    (root / "links" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (root / "templates" / "additional_chat_templates").mkdir(parents=True)
    (root / "templates" / "model.safetensors").touch()
    (root / "templates" / "additional_chat_templates" / "x.jinja").symlink_to(outside / "model.safetensors")
    assert checkpoint_below(root, "a") == checkpoint_below(root, str(root / "a")) == (root / "a").resolve()
    for path, status in (
        ("..", 400),
        ("../outside", 400),
        (str(outside), 400),
        ("link", 400),
        ("links", 400),
        ("templates", 400),
        ("pickles", 400),
        (".", 400),
        ("a/model.safetensors", 400),
        ("nothing", 404),
    ):
        with pytest.raises(ApiError) as caught:
            checkpoint_below(root, path)
        assert caught.value.status == status, path
        assert repr(path) in caught.value.message
        assert ("is a file" in caught.value.message) == (path == "a/model.safetensors")


@pytest.mark.parametrize("root", [None, Path("/")])
def test_an_engine_that_keeps_its_weights_has_no_such_routes(
    start_server: StartServer, engine: FakeEngine, config: FrontendConfig, root: Path | None
) -> None:
    engine.facts = structs.replace(engine.facts, weight_transfer="")
    running = start_server(engine, structs.replace(config, swap_root=root))
    assert post(running.url + SWAP, json={"path": "a"}).status_code == 404
    assert get(running.url + SWAP).status_code == 404


def test_the_state_of_a_swap_is_reported_while_the_engine_loads_weights(
    start_server: StartServer, engine: FakeEngine, config: FrontendConfig
) -> None:
    engine.weights, engine.swap = WeightFacts("3", "changing"), SwapFacts("loading", "/new", 40, "/old", "3")
    found = get(start_server(engine, structs.replace(config, swap_root=Path("/"))).url + SWAP)
    assert (found.status_code, found.json()) == (
        200,
        {
            "state": "loading",
            "path": "/new",
            "percent": 40,
            "active_path": "/old",
            "weight_version": "3",
            "problem": "",
        },
    )


def test_a_swap_is_cancelled_and_is_in_the_audit_log(
    start_server: StartServer, engine: FakeEngine, config: FrontendConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine.weights, engine.swap = WeightFacts("3", "ready"), SwapFacts("draining", "/new", 100, "/old", "3")
    running = start_server(engine, structs.replace(config, swap_root=Path("/")))
    with caplog.at_level(logging.INFO, AUDIT_LOGGER):
        found = httpx.delete(running.url + SWAP, timeout=30)
        until(lambda: any(record.name == AUDIT_LOGGER for record in caplog.records), "a line")
    assert (found.status_code, found.json()["state"]) == (200, "idle")
    (line,) = [record.fields for record in caplog.records if record.name == AUDIT_LOGGER]  # type: ignore[attr-defined]
    assert (line["method"], line["path"], line["status"]) == ("DELETE", SWAP, 200)


def test_there_is_no_swap_without_a_root_nor_to_cancel(
    start_server: StartServer, engine: FakeEngine, config: FrontendConfig
) -> None:
    running = start_server(engine, structs.replace(config, swap_root=None))
    refused = post(running.url + SWAP, json={"path": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "swap_root")
    refused = httpx.delete(running.url + SWAP, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_swap")


def test_other_hosts_change_no_weights_without_keys(
    start_server: StartServer, engine: FakeEngine, config: FrontendConfig
) -> None:
    running = start_server(engine, structs.replace(config, swap_root=Path("/")))
    routes = ["POST /sleep", "POST /wake_up", "GET /is_sleeping", f"POST {SWAP}", f"GET {SWAP}", f"DELETE {SWAP}"]
    routes += [f"POST /{name}_weight_update" for name in ("start", "finish")]
    routes += ["POST /update_weights", "POST /init_weight_transfer_engine"]
    for route in routes:
        method, path = route.split()
        answer = httpx.request(method, running.url + path, headers={"x-forwarded-for": "10.0.0.1"}, timeout=30)
        assert answer.status_code == 403, (route, answer.text)
    assert not engine.sleeps and not engine.updates


def test_folders_are_read_outside_the_event_loop(
    start_server: StartServer, engine: FakeEngine, config: FrontendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Path, given: str) -> Path:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        raise ApiError(404, f"{root} {given}")

    monkeypatch.setattr(swap, "checkpoint_below", refuse)
    monkeypatch.setattr(adapters, "folder_below", refuse)
    running = start_server(engine, structs.replace(config, swap_root=Path("/s"), lora_root=Path("/l")))
    answers = [
        post(running.url + SWAP, json={"path": "a"}),
        post(running.url + "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"}),
    ]
    assert [(answer.status_code, answer.json()["error"]["message"]) for answer in answers] == [
        (404, "/s a"),
        (404, "/l a"),
    ]
