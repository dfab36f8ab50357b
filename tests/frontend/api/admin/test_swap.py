"""Who may swap weights, from where, and which folders."""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from tandem.frontend.api.admin import adapters, swap
from tandem.frontend.api.admin.swap import SwapRequest, checkpoint_below, parse_swap
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.events import SwapFacts, WeightFacts
from tests.fakes.engine import FakeEngine
from tests.frontend.api.admin.conftest import StartServer
from tests.frontend.conftest import get, post

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
        ("nothing", 404),
    ):
        with pytest.raises(ApiError) as caught:
            checkpoint_below(root, path)
        assert caught.value.status == status, path


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
