"""Models of a fake hub: what is downloaded, what the cache saves, and each error with its remedy."""

import errno
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from tandem.frontend.hub.cache import ModelCache
from tandem.frontend.hub.client import HubModel
from tandem.frontend.hub.errors import HubError
from tandem.frontend.hub.options import HubOptions
from tandem.frontend.hub.snapshot import Snapshot, cached_snapshot, find_snapshot
from tandem.frontend.hub.transfer import StoppedError
from tests.fakes.hub_server import COMMIT, HubServer, digest_of, hub_server
from tests.support.hub_models import NAME, SHARDED, SHARDS, SINGLE, UNWANTED, hub_model, names_in, repository
from tests.support.refusals import numbers_in

OTHER_COMMIT = "f" * 40
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server({NAME: repository()}) as running:
        yield running


@pytest.fixture
def gone() -> HubServer:
    """A hub that is not reached: its port is closed."""
    with hub_server({}) as running:
        return running


def find(hub: HubServer, cache: Path, with_weights: bool = True, **settings: object) -> Snapshot:
    return find_snapshot(hub_model(hub, cache, **settings), with_weights, threading.Event())  # type: ignore[arg-type]


def refusal(hub: HubServer, cache: Path, **settings: object) -> str:
    with pytest.raises(HubError) as caught:
        find(hub, cache, **settings)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("files", [SINGLE, SHARDED], ids=["one file", "shards"])
def test_only_the_files_that_serving_needs_are_downloaded(tmp_path: Path, files: dict[str, bytes]) -> None:
    with hub_server({NAME: repository(files | UNWANTED)}) as hub:
        found = find(hub, tmp_path)
        assert found.commit == COMMIT
        assert names_in(found) == set(files)
        assert {name: (found.folder / name).read_bytes() for name in files} == files
        assert Counter(len(hub.bodies(name)) for name in files) == {1: len(files)}
        assert not any(hub.bodies(name) for name in UNWANTED)


def test_more_chat_templates_and_slow_tokenizers_are_among_the_files(tmp_path: Path) -> None:
    more = {"additional_chat_templates/tool_use.jinja": b"x", "merges.txt": b"m", "tokenizer.model": b"s" * 2000}
    with hub_server({NAME: repository(SINGLE | more)}) as hub:
        assert names_in(find(hub, tmp_path)) == set(SINGLE | more)


def test_names_and_sizes_that_no_hub_lists_are_ignored(hub: HubServer, tmp_path: Path) -> None:
    digest = "a" * 40
    names = ["../config.json", "/tmp/config.json", "config.json\n", "a/../config.json", "merges.txt/../../x", ".", ""]
    hub.more_listed = [{"rfilename": name, "size": 2, "blobId": digest} for name in names]
    hub.more_listed += [
        {"rfilename": "vocab.json", "size": size, "blobId": digest} for size in ("9", -1, 1.5, True, None)
    ]
    hub.more_listed += [{"rfilename": "vocab.json", "size": 2, "blobId": text} for text in ("../x", 5, "A" * 40, None)]
    hub.more_listed += [{"rfilename": f"{number}.txt", "size": 1, "blobId": digest} for number in range(5_000)]
    assert names_in(find(hub, tmp_path / "cache")) == set(SINGLE)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_snapshot_links_to_what_was_checked_and_the_hub_is_not_asked_again(hub: HubServer, tmp_path: Path) -> None:
    found = find(hub, tmp_path)
    assert {seen.method for seen in hub.seen} == {"GET"}
    blobs = found.folder.parents[1] / "blobs"
    for name, content in SINGLE.items():
        assert (found.folder / name).resolve() == (blobs / digest_of(content)).resolve()
        assert not (found.folder / name).readlink().is_absolute()


def test_file_system_without_links_has_the_files_themselves(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _target: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    found = find(hub, tmp_path)
    assert {name: (found.folder / name).read_bytes() for name in SINGLE} == SINGLE
    hub.seen.clear()
    assert find(hub, tmp_path) == found
    assert len(hub.seen) == 1


@pytest.mark.parametrize("revision", ["../../main", "/etc/hostname", "x" * 300, "a\0b"])
def test_revision_that_is_no_file_of_the_cache_is_not_in_it(revision: str, hub: HubServer, tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" in refusal(hub, tmp_path, revision=revision, offline=True)
    ModelCache(tmp_path, NAME).record(revision, COMMIT)
    assert not list(tmp_path.rglob("*.tmp"))


def test_spoiled_note_of_a_revision_is_replaced(hub: HubServer, tmp_path: Path) -> None:
    found = find(hub, tmp_path)
    note = found.folder.parents[1] / "refs" / "main"
    note.write_bytes(b"\xff\xfe")
    assert "HF_HUB_OFFLINE" in refusal(hub, tmp_path, offline=True)
    assert find(hub, tmp_path) == found
    assert note.read_text() == COMMIT


@pytest.mark.parametrize("token", ["good\nx", "go od", "gööd", "\x1b[2J"])
def test_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(HubError) as caught:
        HubModel.open(NAME, HubOptions(token=token))
    assert token not in str(caught.value)


def test_frontend_needs_no_weights_and_a_server_then_only_those(hub: HubServer, tmp_path: Path) -> None:
    assert names_in(find(hub, tmp_path, with_weights=False)) == set(SINGLE) - {"model.safetensors"}
    hub.seen.clear()
    assert names_in(find(hub, tmp_path)) == set(SINGLE)
    assert [name for name in SINGLE if hub.bodies(name)] == ["model.safetensors"]


@pytest.mark.parametrize("files", [SINGLE, SHARDED], ids=["one file", "shards"])
def test_small_files_are_checked_before_the_first_byte_of_the_weights(tmp_path: Path, files: dict[str, bytes]) -> None:
    weights = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    seen: list[tuple[set[str], int]] = []

    def check(folder: Path, weight_bytes: int) -> None:
        seen.append(({path.name for path in folder.iterdir()}, weight_bytes))
        if len(seen) == 1:
            raise ValueError("not this model")

    with hub_server({NAME: repository(files | UNWANTED)}) as hub:
        model = hub_model(hub, tmp_path)
        with pytest.raises(ValueError, match=r"^not this model$"):
            find_snapshot(model, True, threading.Event(), check)
        assert not any(hub.bodies(name) for name in weights)
        assert cached_snapshot(model, True) is None
        found = find_snapshot(model, True, threading.Event(), check)
        assert names_in(found) == set(files)
        assert Counter(len(hub.bodies(name)) for name in files) == {1: len(files)}
        assert seen == [(files.keys() - weights.keys(), sum(map(len, weights.values())))] * 2
        find_snapshot(model, True, threading.Event(), check)
        assert len(seen) == 2, "what is in the cache is not checked"


def test_disk_without_room_for_the_weights_is_refused_after_the_check(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: DiskUsage(30_000, 10_000, 20_000))
    with pytest.raises(HubError, match=r"\b20000\b"):
        find_snapshot(hub_model(hub, tmp_path), True, threading.Event(), lambda _, size: checked.append(size))
    assert checked == [len(SINGLE["model.safetensors"])]
    assert hub.bodies("model.safetensors") == []


def test_second_start_downloads_nothing_and_a_pinned_commit_asks_nothing(hub: HubServer, tmp_path: Path) -> None:
    first = find(hub, tmp_path)
    hub.seen.clear()
    assert find(hub, tmp_path) == first
    assert [seen.path for seen in hub.seen] == [f"/api/models/{NAME}/revision/main"]
    hub.seen.clear()
    assert find(hub, tmp_path, revision=COMMIT) == first
    assert hub.seen == []


def test_new_commit_is_downloaded_and_the_old_one_serves_while_it_is_not_whole(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = find(hub, tmp_path)
    changed = hub.repositories[NAME]
    changed.revisions = {"main": OTHER_COMMIT, "v1": COMMIT}
    changed.files["model.safetensors"] = b"n" * 4000
    hub.statuses["model.safetensors"] = [404]
    assert "lost" in refusal(hub, tmp_path)
    hub.statuses["list"] = [500]
    with caplog.at_level(logging.WARNING):
        assert find(hub, tmp_path) == first
    assert "500" in caplog.text and NAME in caplog.text and COMMIT in caplog.text
    assert find(hub, tmp_path).commit == OTHER_COMMIT


def test_small_files_of_a_new_commit_leave_the_weights_of_the_old_one_to_serve_offline(
    hub: HubServer, tmp_path: Path
) -> None:
    first = find(hub, tmp_path)
    hub.repositories[NAME].revisions = {"main": OTHER_COMMIT}
    assert find(hub, tmp_path, with_weights=False).commit == OTHER_COMMIT
    assert find(hub, tmp_path, offline=True) == first
    assert find(hub, tmp_path).commit == OTHER_COMMIT
    assert find(hub, tmp_path, offline=True).commit == OTHER_COMMIT


def test_small_files_alone_serve_a_frontend_offline(hub: HubServer, tmp_path: Path) -> None:
    found = find(hub, tmp_path, with_weights=False)
    assert find(hub, tmp_path, with_weights=False, offline=True) == found


def test_cache_serves_without_the_hub_and_offline(
    hub: HubServer, gone: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = find(hub, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert find(hub, tmp_path, offline=True) == first
        assert caplog.text == ""
        assert find(gone, tmp_path) == first
    assert gone.url in caplog.text


def test_hub_that_is_not_reached_says_what_to_do(gone: HubServer, tmp_path: Path) -> None:
    text = refusal(gone, tmp_path)
    assert gone.url in text and NAME in text and str(tmp_path) in text
    assert "HTTPS_PROXY" in text and "HF_ENDPOINT" in text
    assert "HF_HUB_OFFLINE" in refusal(gone, tmp_path, offline=True)


def test_download_that_is_not_whole_is_named_offline(tmp_path: Path) -> None:
    with hub_server({NAME: repository(SHARDED)}) as sharded:
        found = find(sharded, tmp_path)
        (found.folder / list(SHARDS)[1]).unlink()
        assert f"lacks {list(SHARDS)[1]}" in refusal(sharded, tmp_path, offline=True)


def test_misspelt_name_is_told_apart_from_a_folder(hub: HubServer, tmp_path: Path) -> None:
    text = refusal(hub, tmp_path, name="org/tinny")
    assert "org/tinny" in text and hub.url in text and "401" in text
    assert "404" in refusal(hub, tmp_path, name="org/tinny", token="good")
    assert "org/ti--ny" in refusal(hub, tmp_path, name="org/ti--ny")


def test_private_model_needs_its_token(tmp_path: Path) -> None:
    with hub_server({NAME: repository(token="good")}) as hub:
        text = refusal(hub, tmp_path)
        assert "HF_TOKEN" in text and "--hf-token" in text
        assert "401" in refusal(hub, tmp_path, token="invalid")
        assert names_in(find(hub, tmp_path, token="good")) == set(SINGLE)


def test_gated_model_names_its_page(tmp_path: Path) -> None:
    with hub_server({NAME: repository(gate="good")}) as hub:
        without, waiting = refusal(hub, tmp_path), refusal(hub, tmp_path, token="other")
        assert all(f"{hub.url}/{NAME}" in text for text in (without, waiting))
        assert "--hf-token" in without and "--hf-token" not in waiting
        assert names_in(find(hub, tmp_path, token="good")) == set(SINGLE)


def test_token_goes_to_the_hub_and_not_to_the_cdn(tmp_path: Path) -> None:
    with hub_server({NAME: repository(token="good", gate="good")}) as hub:
        find(hub, tmp_path, token="good")
        sent = {(seen.server, seen.token) for seen in hub.seen}
        assert sent == {("hub", "Bearer good"), ("cdn", "")}


def test_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[NAME].revisions["refs/pr/3"] = OTHER_COMMIT
    assert find(hub, tmp_path, revision="refs/pr/3").commit == OTHER_COMMIT
    assert find(hub, tmp_path, revision="refs/pr/3", offline=True).commit == OTHER_COMMIT
    assert find(hub, tmp_path / "other", revision=COMMIT).commit == COMMIT
    text = refusal(hub, tmp_path, revision="v9")
    assert re.search(rf"\b{NAME} .*\bv9 \(404\).* --revision\b", text)


@pytest.mark.parametrize(
    ("files", "formats"),
    [
        ({"pytorch_model.bin": b"", "m.gguf": b""}, "it has GGUF, PyTorch files (.bin, .pth)"),
        ({"consolidated.safetensors": b""}, "it has Mistral's own format (consolidated.safetensors)"),
        ({"adapter_model.safetensors": b""}, "it has a LoRA adapter (adapter_model.safetensors)"),
        ({"README.md": b""}, "it has no weights in any known format"),
    ],
)
def test_repository_without_safetensors_names_its_formats(
    tmp_path: Path, files: dict[str, bytes], formats: str
) -> None:
    with hub_server({NAME: repository({"config.json": b"{}"} | files)}) as hub:
        text = refusal(hub, tmp_path)
        assert f"{formats}. " in text
        assert not any(hub.bodies(name) for name in files)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"[", "cannot be read"),
        (b'{"weight_map": {"a": "../config.json"}}', " lacks: ../config.json"),
        (b'{"weight_map": {"a": "model-9.safetensors"}}', " lacks: model-9.safetensors"),
        (b'{"weight_map": {"a": "config.json"}}', " lacks: config.json"),
        (b'{"weight_map": {}}', "names no"),
    ],
)
def test_index_that_names_other_files_is_refused(tmp_path: Path, index: bytes, reason: str) -> None:
    with hub_server({NAME: repository(SHARDED | {"model.safetensors.index.json": index})}) as hub:
        assert reason in refusal(hub, tmp_path)


def test_repository_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with hub_server({NAME: repository({"model.safetensors": b"w"})}) as hub:
        assert "config.json" in refusal(hub, tmp_path)


def test_disk_without_room_is_refused_before_the_download(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: DiskUsage(30_000, 10_000, 20_000))
    needed = sum(map(len, SINGLE.values()))
    text = refusal(hub, tmp_path)
    assert {needed, 20000} <= set(numbers_in(text)) and str(tmp_path) in text and "--download-dir" in text
    assert not any(hub.bodies(name) for name in SINGLE)


def test_folder_that_cannot_be_written_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "--download-dir" in (text := refusal(hub, tmp_path / "file")) and os.strerror(errno.ENOTDIR) in text


def test_two_downloads_at_once_fetch_each_file_once(hub: HubServer, tmp_path: Path) -> None:
    hub.hold.clear()
    found: list[Snapshot] = []
    threads = [threading.Thread(target=lambda: found.append(find(hub, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    hub.hold.set()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert {name: (found[0].folder / name).read_bytes() for name in SINGLE} == SINGLE
    assert Counter(len(hub.bodies(name)) for name in SINGLE) == {1: len(SINGLE)}


def test_failed_download_has_left_the_files_that_others_were_reading(tmp_path: Path) -> None:
    broken, slow = SHARDS
    with hub_server({NAME: repository(SHARDED)}) as hub, ThreadPoolExecutor() as pool:
        find(hub, tmp_path, with_weights=False)
        hub.statuses[broken] = [404]
        hub.hold.clear()
        hub.hold_statuses.clear()
        refused = pool.submit(refusal, hub, tmp_path)
        wait_for_part(tmp_path, SHARDS[slow], refused)
        hub.hold_statuses.set()
        assert "lost" in refused.result()
        assert not hub.hold.is_set()
        with FileLock(ModelCache(tmp_path, NAME).locks / f"{digest_of(SHARDS[slow])}.lock", timeout=0):
            pass
        hub.hold.set()
        assert names_in(find(hub, tmp_path)) == set(SHARDED)


def test_stop_ends_a_download_whose_server_has_fallen_silent(hub: HubServer, tmp_path: Path) -> None:
    hub.hold.clear()
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(find_snapshot, hub_model(hub, tmp_path), True, stop)
        wait_for_part(tmp_path, SINGLE["tokenizer.json"], running)
        stop.set()
        with pytest.raises(StoppedError):
            running.result()
    with FileLock(ModelCache(tmp_path, NAME).locks / f"{digest_of(SINGLE['tokenizer.json'])}.lock", timeout=0):
        assert not hub.hold.is_set()


def wait_for_part(cache: Path, content: bytes, running: "Future[object]") -> None:
    """Wait until a part of a file is here, or its download has ended."""
    partial = ModelCache(cache, NAME).partial(digest_of(content))
    while not running.done() and not (partial.is_file() and partial.stat().st_size):
        time.sleep(0.001)
