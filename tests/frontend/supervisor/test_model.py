"""The model that is given to a command: a folder, a name on the hub, or neither."""

from pathlib import Path

import pytest

from tandem.frontend.hub.options import HubOptions
from tandem.frontend.supervisor.model import LaunchError, ModelFolder, find_model, is_hub_name
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
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("Qwen/Qwen3")
    assert find_model("Qwen/Qwen3", HubOptions()) == ModelFolder(Path("Qwen/Qwen3"))


def test_gguf_file_is_named_as_such() -> None:
    with pytest.raises(LaunchError, match="GGUF format, which is not supported"):
        find_model("Qwen3-4B-Q4_K_M.gguf", HubOptions())


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"is not a directory; give .* or a name on the hub like Qwen/Qwen3-0.6B"):
        find_model(str(tmp_path / "none"), HubOptions())


def test_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is a directory here, and --revision is for names on the hub"):
        find_model(str(tmp_path), HubOptions(revision="main"))


def test_default_model_is_a_folder_without_a_name() -> None:
    found = find_model(None, HubOptions())
    assert (found.folder / "config.json").is_file()
    assert found.options(EngineOptions()) == EngineOptions()


@pytest.mark.parametrize("given", [None, "mine"])
def test_model_of_the_hub_is_served_under_its_name_unless_told_another(given: str | None) -> None:
    options = ModelFolder(Path("/cache/0123"), "org/tiny", "0123").options(
        EngineOptions(model="org/tiny", served_model_name=given)
    )
    assert options == EngineOptions(model="/cache/0123", served_model_name=given or "org/tiny")
