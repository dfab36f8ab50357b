"""The files of a folder are found, and folders that do not hold a sound checkpoint are refused with what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.folder import INDEX, MAX_INDEX_BYTES, SINGLE, read_folder
from tests.engine_core.models.test_llama import save_random
from tests.support.paged_model import load
from tests.support.safetensors_files import entry, write

A = {"a": entry("F32", [2], 0, 8)}
B = {"b": entry("F32", [2], 0, 8)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"


def names(directory: Path) -> set[tuple[str, str]]:
    return {(path.name, name) for path, found in read_folder(directory).items() for name in found}


def index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_folder(directory)
    return str(caught.value)


def test_a_single_file_an_index_and_the_only_file_of_another_name_are_read(tmp_path: Path) -> None:
    write(tmp_path / "other.safetensors", B, 8)
    assert names(tmp_path) == {("other.safetensors", "b")}
    write(tmp_path / "one.safetensors", A, 8)
    index(tmp_path, {"a": "one.safetensors", "b": "other.safetensors"})
    assert names(tmp_path) == {("one.safetensors", "a"), ("other.safetensors", "b")}
    write(tmp_path / SINGLE, A, 8)
    assert names(tmp_path) == {(SINGLE, "a")}


def test_links_out_of_the_folder_are_followed_as_in_a_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write(blobs / "4d7a2146", A, 8)
    (blobs / "9c01").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../blobs/4d7a2146")
    (snapshot / INDEX).symlink_to("../blobs/9c01")
    assert names(snapshot) == {("model-00001-of-00001.safetensors", "a")}
    (blobs / "4d7a2146").unlink()
    assert re.search(r"missing: model-00001-of-00001\.safetensors\b", refusal(snapshot))


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ([], "safetensors, or convert"),
        (
            ["pytorch_model-00001-of-00002.bin"],
            r"\(pytorch_model-00001-of-00002\.bin\).*save_pretrained",
        ),
        (["consolidated.00.pth"], r"\(consolidated\.00\.pth\).*save_pretrained"),
        (["model-Q4_K_M.GGUF"], r"GGUF .*\(model-Q4_K_M\.GGUF\).*safetensors"),
        (
            [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)],
            r"\b4\b.*\(model-00001-of-00004\.safetensors, .*\).*\bindex\b",
        ),
    ],
)
def test_other_formats_are_named_with_what_to_do(files: list[str], remedy: str, tmp_path: Path) -> None:
    for name in ["config.json", *files]:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"\bmodel\.safetensors .*model\.safetensors\.index\.json.*{remedy}"):
        read_folder(tmp_path)


def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    message = refusal(tmp_path / "gone")
    assert str(tmp_path / "gone") in message and "does not exist" in message and SINGLE not in message


def test_a_folder_instead_of_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()
    assert "neither" in refusal(tmp_path)


@pytest.mark.parametrize("content", [POINTER, b"", b"GGUF" + bytes(60)])
def test_shards_that_are_pointers_empty_or_of_another_format_are_named(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", A, 8)
    (tmp_path / "two.safetensors").write_bytes(content)
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    text = refusal(tmp_path)
    assert text.startswith(f"{tmp_path / 'two.safetensors'} ")
    assert ("git lfs pull" in text) == (content == POINTER)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/outside.safetensors", "sub/in.safetensors", "./one.safetensors", "a/.."]
)
def test_an_index_may_not_leave_its_directory(shard: str, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", A, 8)
    write(tmp_path.parent / "outside.safetensors", B, 8)
    index(tmp_path, {"a": "one.safetensors", "b": shard})
    assert f"outside its directory: {shard}" in refusal(tmp_path)


@pytest.mark.parametrize("shard", ["", ".", "..", "x" * 5000, "nul\0.safetensors", "gone.safetensors"])
def test_names_in_an_index_that_are_no_files_are_missing(shard: str, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", A, 8)
    index(tmp_path, {"a": "one.safetensors", "b": shard})
    text = refusal(tmp_path)
    assert "missing: " in text or "outside its directory: " in text
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"weight_map": {"a": 1}}',
        b"{}",
        b'{"weight_map": {"\xff": "a"}}',
        b'{"weight_map":' + b"[" * 90000,
    ],
)
def test_a_malformed_index_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    assert "index.json is malformed: " in refusal(tmp_path)


def test_an_index_that_is_empty_a_pointer_or_too_large_is_refused(tmp_path: Path) -> None:
    index(tmp_path, {})
    assert f"{tmp_path / INDEX} names no" in refusal(tmp_path)
    (tmp_path / INDEX).write_bytes(POINTER)
    assert re.search(rf"{INDEX} .*`git lfs pull`", refusal(tmp_path))
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(100_000_000)
    assert re.search(rf"{INDEX} .*\b{MAX_INDEX_BYTES}\b", refusal(tmp_path))


def sharded(directory: Path) -> dict[str, str]:
    save_random(directory, {}, max_shard_size="60KB")
    found: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return found


def test_missing_and_corrupt_shards_are_named(tmp_path: Path) -> None:
    shards = sorted(set(sharded(tmp_path).values()))
    whole = (tmp_path / shards[1]).read_bytes()
    (tmp_path / shards[1]).write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"/{shards[1]} .*\b{len(whole) - 1}\b"):
        load(tmp_path)
    (tmp_path / shards[1]).unlink()
    (tmp_path / shards[2]).unlink()
    with pytest.raises(ConfigError, match=f"missing: {shards[1]}, {shards[2]}"):
        load(tmp_path)


def test_shards_and_index_must_agree(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    shards = sorted(set(weight_map.values()))
    first, second = (next(name for name, file in weight_map.items() if file == shard) for shard in shards[:2])
    index(tmp_path, {**weight_map, "model.extra": shards[0], first: shards[1]})
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert re.search(rf"model\.extra .*\bnot in {shards[0]}", str(caught.value))
    assert re.search(rf"{first} .*\bnot in {shards[1]}", str(caught.value))
    index(tmp_path, weight_map)
    tensors = load_file(tmp_path / shards[0])
    save_file({**tensors, second: load_file(tmp_path / shards[1])[second]}, tmp_path / shards[0])
    with pytest.raises(ConfigError, match=rf"{second} .*{shards[0]} and {shards[1]}"):
        load(tmp_path)


def test_of_many_disagreements_twenty_are_named(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", A, 8)
    index(tmp_path, {f"t{number}": "one.safetensors" for number in range(500)})
    lines = refusal(tmp_path).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 480 more"
