"""Tokenizers without a tokenizer.json: converted once in a child process, or refused with a remedy."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tandem.frontend.hub.options import HubOptions
from tandem.frontend.supervisor import convert_tokenizer, tokenizer
from tandem.frontend.supervisor.model import LaunchError, find_model
from tandem.frontend.supervisor.tokenizer import ConversionError, with_tokenizer
from tandem.protocol.engine_options import EngineOptions

TEXT = "the quick brown fox jumps over the lazy dog"


def write_slow_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Write vocab.json and merges.txt of a small tokenizer, and a file that stands for the weights."""
    folder.mkdir(exist_ok=True)
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    raw.train_from_iterator([TEXT] * 5, trainer)
    raw.model.save(str(folder))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return raw


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str) -> None:
    """Let the child process end with an exit code and a text."""

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_tokenizer_is_converted_once_beside_links_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_slow_tokenizer(tmp_path / "tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = find_model(str(tmp_path / "tiny"), HubOptions())
    converted = tokenizers.Tokenizer.from_file(str(found.folder / "tokenizer.json"))
    assert converted.encode(TEXT).ids == raw.encode(TEXT).ids
    assert (found.folder / "model.safetensors").read_bytes() == b"weights"
    assert not (tmp_path / "tiny" / "tokenizer.json").exists()
    assert found.options(EngineOptions()).served_model_name == "tiny"
    refuse(monkeypatch, 1, "converted again")
    (tmp_path / "tiny" / "generation_config.json").write_text("{}")
    assert find_model(str(tmp_path / "tiny"), HubOptions()) == found
    assert (found.folder / "generation_config.json").read_text() == "{}"
    assert find_model(str(found.folder), HubOptions()).folder == found.folder
    (tmp_path / "tiny" / "vocab.json").write_text("{}")
    with pytest.raises(LaunchError, match=r"\bvocab\.json\b"):
        find_model(str(tmp_path / "tiny"), HubOptions())


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_folder_with_a_tokenizer_or_nothing_to_convert_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert with_tokenizer(tmp_path, tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConversionError, match=" ".join(("transformers", "sentencepiece", "protobuf", "tiktoken"))):
        with_tokenizer(tmp_path / "tiny", tmp_path / "cache")


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (1, "loading\nValueError: no such class", ": ValueError: no such class. "),
        (1, "ValueError: `tiktoken` is required", ": `tiktoken` is required. "),
        (-9, "", "time or memory"),
        (0, "", "exit code 0"),
    ],
)
def test_failed_conversion_gives_its_reason_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, reason: str
) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    refuse(monkeypatch, code, stderr)
    with pytest.raises(ConversionError) as caught:
        with_tokenizer(tmp_path / "tiny", tmp_path / "cache")
    assert reason in str(caught.value)
    assert f"AutoTokenizer.from_pretrained('{tmp_path}/tiny').save_pretrained(" in str(caught.value)
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


class Conversions:
    """Conversions without a child process, with the environment of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.environments: list[dict[str, str]] = []
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, command: list[str], env: dict[str, str], **_: Any) -> "subprocess.CompletedProcess[str]":
        self.environments.append(env)
        (Path(command[-1])).mkdir()
        (Path(command[-1]) / "tokenizer.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")


def test_conversions_at_once_are_one_and_all_see_whole_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    conversions = Conversions(monkeypatch)
    (tmp_path / "cache" / "tokenizers" / "new-killed" / "in").mkdir(parents=True)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: with_tokenizer(tmp_path / "tiny", tmp_path / "cache"), range(12)))
    assert len(set(found)) == len(conversions.environments) == 1
    names = {path.name for path in found[0].iterdir()}
    assert names == {path.name for path in (tmp_path / "tiny").iterdir()} | {"tokenizer.json"}
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 1


def test_conversion_gets_no_secrets_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    for name in ("HF_TOKEN", "TANDEM_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    conversions = Conversions(monkeypatch)
    with_tokenizer(tmp_path / "tiny", tmp_path / "cache")
    assert "PATH" in conversions.environments[0]
    assert "secret" not in conversions.environments[0].values()


def test_cache_belongs_to_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    conversions = Conversions(monkeypatch)
    cache = tmp_path / "cache"
    with_tokenizer(tmp_path / "tiny", cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(ConversionError, match=r"\b777\b.*XDG_CACHE_HOME"):
        with_tokenizer(tmp_path / "tiny", cache)
    cache.chmod(0o700)
    owner = cache.stat().st_uid
    monkeypatch.setattr(Path, "stat", lambda path, **_: os.stat_result((*os.stat(path)[:4], 4321, *os.stat(path)[5:])))
    with pytest.raises(ConversionError, match=r"\b4321\b"):
        tokenizer._make_private(cache)
    assert owner == os.geteuid()
    assert len(conversions.environments) == 1


def test_files_beyond_any_tokenizers_size_are_not_read(tmp_path: Path) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    os.truncate(tmp_path / "tiny" / "vocab.json", tokenizer.MAX_SOURCE_BYTES + 1)
    with pytest.raises(ConversionError, match=r"\b268435456\b"):
        with_tokenizer(tmp_path / "tiny", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_reason_cannot_write_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_slow_tokenizer(tmp_path / "tiny")
    refuse(monkeypatch, 1, "ValueError: \x1b]0;evil\x07")
    with pytest.raises(ConversionError, match=r"ValueError: \?\]0;evil\?"):
        with_tokenizer(tmp_path / "tiny", tmp_path / "cache")


def test_child_process_has_limits() -> None:
    program = (
        "import resource\n"
        "from tandem.frontend.supervisor.convert_tokenizer import limit\n"
        "limit()\n"
        "print([resource.getrlimit(k)[0] for k in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    limits = (convert_tokenizer.MAX_CPU_SECONDS, convert_tokenizer.MAX_MEMORY_BYTES, convert_tokenizer.MAX_FILE_BYTES)
    assert done.stdout.strip() == str(list(limits))
