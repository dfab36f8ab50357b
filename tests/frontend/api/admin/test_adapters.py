"""Routes of adapters: bodies, folders below the root, and what the engine is asked."""

from pathlib import Path

import pytest
from msgspec import structs

from tandem.frontend.api.admin.adapters import folder_below, parse_load, parse_unload
from tandem.frontend.config import FrontendConfig
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, post

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"lora_name": "a"}',
        b'{"lora_path": "a"}',
        b'{"lora_name": 1, "lora_path": "a"}',
        b'{"lora_name": "", "lora_path": "a"}',
        b'{"lora_name": "a", "lora_path": "a\\u0000"}',
        b'{"lora_name": "a", "lora_path": "a", "load_inplace": 1}',
        b'{"lora_name": "%s", "lora_path": "a"}' % (b"x" * 300),
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_load(body, IgnoredFields())
    assert caught.value.status == 400


def test_bodies_are_those_of_vllm() -> None:
    found = parse_load(b'{"lora_name": "a", "lora_path": "b", "load_inplace": true}', IgnoredFields())
    assert (found.name, found.path, found.replaces) == ("a", "b", True)
    assert not parse_load(b'{"lora_name": "a", "lora_path": "b"}', IgnoredFields()).replaces
    assert parse_unload(b'{"lora_name": "a"}', IgnoredFields()) == "a"


def test_a_folder_is_below_the_root_with_all_links_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "a", root / "links", outside):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "own").symlink_to(root / "a")
    (root / "links" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    assert folder_below(root, "a") == folder_below(root, str(root / "a")) == folder_below(root, "own") == root / "a"
    for path, status in (
        ("..", 400),
        ("../outside", 400),
        ("a/../../outside", 400),
        (str(outside), 400),
        ("/", 400),
        ("link", 400),
        ("links", 400),
        ("nothing", 404),
    ):
        with pytest.raises(ApiError) as caught:
            folder_below(root, path)
        assert caught.value.status == status, path


def test_without_a_root_there_are_no_routes(engine: FakeEngine, config: FrontendConfig) -> None:
    engine.start()
    running = RunningServer(structs.replace(config, lora_root=None)).start().ready()
    try:
        for path in (LOAD, UNLOAD):
            assert post(running.url + path, json={"lora_name": "a", "lora_path": "a"}).status_code == 404
    finally:
        running.stop()
