"""Files of adapters stay those that were opened and checked, whatever happens to their names."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.lora.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, file_stamp

NAMES = (CONFIG_FILE, WEIGHTS_FILE)


def written(folder: Path, content: str = "own") -> Path:
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(f"{content} {name}")
    return folder


def text(opened: AdapterFolder, name: str) -> str:
    with open(opened.path / name, opener=opened.opener) as file:
        return file.read()


@pytest.mark.parametrize("replaced", [*NAMES, ""])
def test_a_name_that_is_changed_after_the_check_leads_to_the_file_that_was_checked(
    replaced: str, tmp_path: Path
) -> None:
    """The names are links to another folder by then; the last case replaces the folder itself."""
    root = tmp_path / "root"
    folder, outside = written(root / "a"), written(tmp_path / "outside", "foreign")
    with AdapterFolder(folder, root) as opened:
        before = opened.stamp
        (root / "old").mkdir()
        (folder / replaced).rename(root / "old" / "x")
        (folder / replaced).symlink_to(outside / replaced)
        assert [text(opened, name) for name in NAMES] == [f"own {name}" for name in NAMES]
        assert opened.stamp == before != file_stamp(folder)
    with pytest.raises(ConfigError, match="--lora-root"), AdapterFolder(folder, root):
        pass


def test_links_within_the_root_are_followed(tmp_path: Path) -> None:
    """As in the cache of the hub, where the files of a snapshot are links to blobs."""
    blobs, folder = written(tmp_path / "blobs"), tmp_path / "snapshot"
    folder.mkdir()
    for name in NAMES:
        (folder / name).symlink_to(blobs / name)
    with AdapterFolder(folder, tmp_path) as opened:
        assert text(opened, CONFIG_FILE) == f"own {CONFIG_FILE}" and opened.stamp == file_stamp(folder)
    with pytest.raises(ConfigError, match="--lora-root"), AdapterFolder(folder, folder):
        pass
    with AdapterFolder(folder) as opened:
        assert text(opened, WEIGHTS_FILE) == f"own {WEIGHTS_FILE}"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_without_waiting(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    (folder / name).unlink()
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("no", path)):
        make(folder / name)
        with pytest.raises(ConfigError, match="is not a file"), AdapterFolder(folder):
            pass
        (folder / name).rename(tmp_path / f"tried {name}")
        if (tmp_path / f"tried {name}").is_dir():
            (tmp_path / f"tried {name}").rmdir()


def num_open(folder: Path) -> int:
    """Return how many files of a folder this process has open, whatever else it opens and closes meanwhile."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/")
    return found


def test_all_files_are_closed(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    with AdapterFolder(folder):
        assert num_open(folder) == 2
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError), AdapterFolder(folder):
        pass
    assert num_open(folder) == 0
