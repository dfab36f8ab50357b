"""Folders that hold no model: what they hold is named, and what to give in their place."""

import json
import os
from pathlib import Path

import pytest

from tandem.frontend.hub.options import HubOptions
from tandem.frontend.hub.selection import TOKENIZER_SOURCES, has_tokenizer
from tandem.frontend.supervisor.model import LaunchError, ModelFolder, find_model
from tandem.frontend.supervisor.wrong_folder import check_readable, inaccessible

ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"})


def folder_of(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"adapter_config.json": ADAPTER, "adapter_model.safetensors": "", "tokenizer.json": ""},
            r"holds an adapter \(LoRA\) for meta-llama/Llama-3.2-1B, and .* not supported; merge it .*merge_and_unload",
        ),
        (
            {"adapter_config.json": "{", "config.json": "{}", "adapter_model.safetensors": ""},
            r"holds an adapter \(LoRA\), and",
        ),
        ({"Llama-Q4_K_M.gguf": "", "README.md": ""}, r"not supported: GGUF; give a folder in Hugging Face's"),
        (
            {"consolidated.safetensors": "", "params.json": "{}", "tekken.json": "{}"},
            r"has no config.json, and .*: Mistral's own format \(consolidated.safetensors\); give",
        ),
        ({"consolidated.00.pth": "", "params.json": "{}"}, r"not supported: PyTorch files"),
        ({"model.onnx": "", "tokenizer.json": "{}"}, r"not supported: ONNX; give"),
        ({}, r"has no config.json; give a folder in Hugging Face's format"),
        ({"pyproject.toml": "", "src/a.py": ""}, r"has no config.json; give a folder in Hugging Face's format"),
        ({"model.safetensors": ""}, r"has no config.json; give a folder in Hugging Face's format"),
        ({"a/config.json": "", "b/config.json": ""}, r"but folders in it have; give one of them: \S*/a, \S*/b$"),
        ({f"{name}/config.json": "" for name in "abcde"}, r"give one of them: \S*/a, \S*/b, \S*/c \(and 2 more\)$"),
        ({"snapshots/0a1/config.json": "", "refs/main": "0a1"}, r"of huggingface_hub's cache; give \S*/snapshots/0a1$"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_what_it_holds(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, files)
    for with_weights in (True, "tokenizer.json" in files):  # a frontend without a tokenizer cannot run either
        with pytest.raises(LaunchError, match=said):
            find_model(str(folder), HubOptions(), with_weights=with_weights)


def test_a_folder_of_the_cache_is_named_as_on_the_hub(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "models--Qwen--Qwen3-4B", {"snapshots/0a1/config.json": ""})
    with pytest.raises(LaunchError, match=r"\bQwen/Qwen3-4B\b.*/snapshots/0a1$"):
        find_model(str(folder), HubOptions())


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{}"},
        {"config.json": "{}", "pytorch_model.bin": ""},
        {"config.json": "{}", "original/config.json": "{}", "model.safetensors": ""},
        {"adapter_config.json": ADAPTER, "config.json": "{}", "model.safetensors": ""},
        {"model.safetensors": "", "tokenizer.json": "{}"},
    ],
)
def test_other_folders_are_left_to_the_engine(files: dict[str, str], tmp_path: Path) -> None:
    assert find_model(str(folder_of(tmp_path, files)), HubOptions()) == ModelFolder(tmp_path)


def test_a_folder_of_another_user_is_refused_with_who_may_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat_of_another(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return os.stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat_of_another)
    said = rf"the model {tmp_path}: {tmp_path}/\S+ cannot be read by the user with the id {os.geteuid()}; give it"
    for with_weights in (True, False):
        with pytest.raises(LaunchError, match=said):
            find_model(str(tmp_path), HubOptions(), with_weights=with_weights)


def deny(monkeypatch: pytest.MonkeyPatch, denied: Path) -> None:
    """Let this user, who may be root, have no right to a file or folder."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: Path(path) != denied and real(path, mode, **how))


@pytest.mark.parametrize(
    ("name", "by_frontends"),
    [
        *[(name, True) for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")],
        *[(name, False) for name in ("model.safetensors.index.json", "model-00002-of-00002.safetensors")],
    ],
)
def test_a_file_that_may_not_be_read_is_named_with_the_user(
    name: str, by_frontends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "chat_template.jinja")
    folder = folder_of(tmp_path, dict.fromkeys((*files, "consolidated.safetensors", "trainer_state.json"), "{}"))
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    index = {"model.safetensors.index.json": json.dumps(shards)}
    folder_of(folder, index | dict.fromkeys(shards["weight_map"].values(), ""))
    for left_alone in ("README.md", "consolidated.safetensors", "trainer_state.json"):
        deny(monkeypatch, folder / left_alone)
    assert find_model(str(folder), HubOptions()) == ModelFolder(folder)
    deny(monkeypatch, folder / name)
    for with_weights in (True, False)[: 1 + by_frontends]:
        with pytest.raises(LaunchError, match=rf"{folder}/{name}\b.*\b{os.geteuid()}\b"):
            find_model(str(folder), HubOptions(), with_weights=with_weights)
    if not by_frontends:
        assert find_model(str(folder), HubOptions(), with_weights=False) == ModelFolder(folder)


@pytest.mark.parametrize(("name", "by_frontends"), [("model.safetensors", False), ("tokenizer.model", True)])
def test_a_tokenizer_to_convert_and_a_single_file_of_weights_are_read_too(
    name: str, by_frontends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.model")
    folder = folder_of(tmp_path, dict.fromkeys(files, "{}"))
    deny(monkeypatch, folder / "model.safetensors.index.json")
    check_readable(folder, True)
    deny(monkeypatch, folder / name)
    for with_weights in (True, False)[: 1 + by_frontends]:
        with pytest.raises(PermissionError, match=name):
            check_readable(folder, with_weights)


def test_a_folder_that_may_not_be_entered_is_named_and_no_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    deny(monkeypatch, folder)
    assert inaccessible(folder / "deeper" / "adapter_config.json") == folder
    assert inaccessible(tmp_path / "other.json") == tmp_path / "other.json"


@pytest.mark.parametrize("name", ["tokenizer.json", *TOKENIZER_SOURCES])
def test_a_tokenizer_may_be_one_to_convert(name: str, tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    assert has_tokenizer(folder_of(tmp_path, {name: ""}))


@pytest.mark.parametrize("files", [{"adapter_config.json": ADAPTER}, {"model.gguf": ""}, {}])
def test_a_frontend_takes_the_tokenizer_of_any_folder(files: dict[str, str], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, files | {"tokenizer.json": "{}"})
    assert find_model(str(folder), HubOptions(), with_weights=False) == ModelFolder(folder)
