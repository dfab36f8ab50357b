"""The model that is given to a command: a folder, a name on the hub, or neither."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.frontend.hub.options import HubOptions
from tandem.frontend.supervisor import model as supervisor_model
from tandem.frontend.supervisor.model import LaunchError, ModelFolder, find_draft_model, find_model, is_hub_name
from tandem.protocol.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("meta-llama/Llama-3.2-1B-Instruct", True),
        ("01-ai/Yi-6B", True),
        ("gpt2", False),
        ("./Qwen/Qwen3", False),
        ("../models", False),
        ("/models/qwen3", False),
        ("~/models", False),
        ("models/org/name", False),
        ("org/", False),
        ("org/model.gguf", False),
        ("", False),
    ],
)
def test_name_on_the_hub_is_told_from_a_path(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(text) is expected


def test_folder_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen" / "Qwen3").mkdir(parents=True)
    (tmp_path / "Qwen" / "Qwen3" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("Qwen/Qwen3")
    assert find_model("Qwen/Qwen3", HubOptions()) == ModelFolder(Path("Qwen/Qwen3"))


def test_gguf_file_is_named_as_such() -> None:
    with pytest.raises(LaunchError, match="GGUF"):
        find_model("Qwen3-4B-Q4_K_M.gguf", HubOptions())


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=re.escape(str(tmp_path / "none"))):
        find_model(str(tmp_path / "none"), HubOptions())


@pytest.mark.parametrize(("name", "text"), [("HF_ENDPOINT", "http://[::1"), ("HF_HUB_ETAG_TIMEOUT", "soon")])
def test_settings_that_the_library_cannot_read_are_named(name: str, text: str) -> None:
    program = (
        "from tandem.frontend.supervisor import model\n"
        "try: model.find_model('org/tiny', model.HubOptions())\n"
        "except model.LaunchError as error: print(error)"
    )
    environment = {**os.environ, name: text}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "HF_ENDPOINT" in done.stdout, done.stderr


def test_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--revision"):
        find_model(str(tmp_path), HubOptions(revision="main"))


def model_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in (*names, "tokenizer.json"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("given", "others"),
    [("model.safetensors", ["model-1.safetensors", "model.safetensors.index.json"]), ("weights.safetensors", [])],
)
def test_file_of_all_weights_stands_for_its_folder(given: str, others: list[str], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", "config.json", given, *others)
    found = find_model(str(folder / given), HubOptions())
    assert found == ModelFolder(folder, "tiny")
    assert found.options(EngineOptions()) == EngineOptions(model=str(folder), served_model_name="tiny")


@pytest.mark.parametrize(
    ("given", "others", "reason"),
    [
        ("model.safetensors", [], r"weights, .*config\.json and tokenizer"),
        (
            "a.safetensors",
            ["config.json", "b.safetensors"],
            "files of .*weights, .*folder",
        ),
        ("a.safetensors", ["config.json", "model.safetensors.index.json"], "files of .*weights"),
        ("config.json", [], "no safetensors;.* folder"),
        ("q.gguf", ["config.json"], "GGUF"),
    ],
)
def test_other_file_is_refused_with_its_reason(given: str, others: list[str], reason: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", given, *others)
    with pytest.raises(LaunchError, match=reason):
        find_model(str(folder / given), HubOptions())


def test_revision_without_a_model_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--revision\b.*--model\b"):
        find_model(None, HubOptions(revision="main"))


def test_revision_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", "config.json", "model.safetensors")
    with pytest.raises(LaunchError, match="--revision"):
        find_model(str(folder / "model.safetensors"), HubOptions(revision="main"))


@pytest.mark.parametrize("name", ["x" * 5000, f"org/{'x' * 300}", "a\0b"])
def test_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(LaunchError):
        find_model(name, HubOptions())


def test_default_model_is_a_folder_without_a_name() -> None:
    found = find_model(None, HubOptions())
    assert (found.folder / "config.json").is_file()
    assert found.options(EngineOptions()) == EngineOptions()
    assert found.served_name == "tandem-default"


def test_model_of_a_folder_is_served_under_the_name_of_the_real_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    assert ModelFolder(tmp_path / "link").served_name == "tiny"
    assert ModelFolder(folder, "org/tiny").served_name == "org/tiny"


@pytest.mark.parametrize("given", [None, "mine"])
def test_model_of_the_hub_is_served_under_its_name_unless_told_another(given: str | None) -> None:
    options = ModelFolder(Path("/cache/0123"), "org/tiny", "0123").options(
        EngineOptions(model="org/tiny", served_model_name=given)
    )
    assert options == EngineOptions(model="/cache/0123", served_model_name=given or "org/tiny")


def test_a_draft_model_is_a_folder_wherever_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "small", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for given in ("small", "small/model.safetensors"):
        found = find_draft_model(EngineOptions(speculate=f"model:{given}", speculate_tokens=3), HubOptions())
        assert found == EngineOptions(speculate=f"model:{tmp_path / 'small'}", speculate_tokens=3)
    for options in (EngineOptions(), EngineOptions(speculate="ngram")):
        assert find_draft_model(options, HubOptions()) is options


def test_a_draft_model_of_the_hub_is_downloaded_at_its_own_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def download(*given: object, **also: object) -> ModelFolder:
        asked.extend((*given, also))
        return ModelFolder(tmp_path, "small", "0123")

    monkeypatch.setattr(supervisor_model, "find_model", download)
    hub = HubOptions("v2", "secret", tmp_path / "cache")
    found = find_draft_model(EngineOptions(speculate="model:org/small"), hub, may_download=False)
    assert found.draft_model == str(tmp_path)
    assert asked == ["org/small", HubOptions(None, "secret", tmp_path / "cache"), {"may_download": False}]


def test_a_draft_model_that_is_missing_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=re.escape(f"--speculate model:{tmp_path / 'none'}: ")):
        find_draft_model(EngineOptions(speculate=f"model:{tmp_path / 'none'}"), HubOptions())
