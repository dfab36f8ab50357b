"""Adapters of the flags: names, folders, and the file that the engine reads."""

import argparse
from pathlib import Path

import pytest

from tandem.frontend.cli.flags import lora_module
from tandem.frontend.hub.options import HubOptions
from tandem.frontend.supervisor.adapters import check_modules, find_adapters
from tandem.frontend.supervisor.launch import adapters_argv
from tandem.frontend.supervisor.model import LaunchError
from tandem.protocol.adapters_file import AdaptersFile, read_adapters, write_adapters
from tandem.protocol.events import AdapterFacts


@pytest.mark.parametrize("text", ["sql=/a=b", '{"name": "sql", "path": "/a=b", "base_model_name": "x"}'])
def test_a_module_has_a_name_and_a_path(text: str) -> None:
    assert lora_module(text) == ("sql", "/a=b")


@pytest.mark.parametrize("text", ["sql", "=x", "sql=", "{", '{"name": "x"}', '{"name": 1, "path": "x"}', " =x"])
def test_other_texts_are_no_modules(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        lora_module(text)


def test_modules_that_no_engine_could_serve_are_refused(tmp_path: Path) -> None:
    check_modules([("a", "x"), ("b", "x")], ("base", "other"), True, tmp_path)
    for modules, enabled, root in (
        ([("a", "x")], False, None),
        ([], False, tmp_path),
        ([("base", "x")], True, None),
        ([("other", "x")], True, None),
        ([("a", "x"), ("a", "y")], True, None),
        ([], True, tmp_path / "nothing"),
    ):
        with pytest.raises(LaunchError, match="--lora-"):
            check_modules(modules, ("base", "other"), enabled, root)


def test_a_path_is_a_folder_or_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options))
        if name == "me/missing":
            raise OSError("no such repository\nmore")
        return "/cache/x"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    hub = HubOptions(None, "secret", tmp_path)
    for file, missing in (("adapter_config.json", 2), ("adapter_model.safetensors", 1)):
        with pytest.raises(LaunchError, match="--lora-modules a=") as refused:
            find_adapters([("a", str(tmp_path))], hub)
        assert str(refused.value).count("has no") + str(refused.value).count("and no") == missing
        (tmp_path / file).touch()
    assert find_adapters([("a", str(tmp_path)), ("b", "me/x")], hub) == {"a": str(tmp_path), "b": "/cache/x"}
    assert asked[0][0] == "me/x" and asked[0][1]["token"] == "secret"
    for path in ("/nothing", "me/missing"):
        with pytest.raises(LaunchError, match="--lora-modules c="):
            find_adapters([("c", path)], hub)


def test_the_file_of_an_engine_is_kept_whole(tmp_path: Path) -> None:
    flag, name = adapters_argv(tmp_path, {"a": "/a", "b": "/b"})
    assert flag == "--adapters-file"
    found = read_adapters(Path(name))
    assert found == AdaptersFile([AdapterFacts("a", "/a", 1), AdapterFacts("b", "/b", 2)], 3, is_given=True)
    write_adapters(Path(name), AdaptersFile(found.adapters[:1], 9))
    assert read_adapters(Path(name)) == AdaptersFile(found.adapters[:1], 9)
    assert read_adapters(tmp_path / "nothing") == AdaptersFile()
    Path(name).write_bytes(b"{")
    with pytest.raises(ValueError, match="damaged"):
        read_adapters(Path(name))
