"""Private directories: their mode, their end, and what is removed of killed processes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.frontend import run_directory as module
from tandem.frontend.run_directory import LOCK_NAME, remove_stale, run_directory

OWNER = """
import sys
from tandem.frontend.run_directory import run_directory
with run_directory() as folder:
    (folder / "store.sqlite3").write_text("stored")
    (folder / "more").mkdir()
    (folder / "more" / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(ipc_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files whose path is short enough for sockets."""
    monkeypatch.setattr(tempfile, "tempdir", str(ipc_dir))
    return ipc_dir


@pytest.fixture
def owner(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that owns a run directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(parent)},
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_directory_is_private_and_removed_at_the_end(parent: Path) -> None:
    with run_directory() as folder:
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert list(parent.iterdir()) == []


def test_long_directory_for_temporary_files_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * module.MAX_PARENT_BYTES)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with run_directory() as folder:
        assert folder.parent == Path("/tmp")


def test_directory_of_a_killed_process_is_removed_by_the_next(
    parent: Path, owner: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = owner
    process.kill()
    process.wait()
    assert (folder / "store.sqlite3").exists()
    with run_directory() as own:
        assert list(parent.iterdir()) == [own]


def test_directory_of_a_running_process_is_kept(parent: Path, owner: tuple[subprocess.Popen[str], Path]) -> None:
    _, folder = owner
    with run_directory() as own, run_directory() as second:
        assert set(parent.iterdir()) == {folder, own, second}
    assert (folder / "more" / "file").exists()


def test_nothing_else_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = parent / "elsewhere"
    for folder in (target, parent / "tandem-without-lock", parent / "tandem-lock-is-a-link", parent / "tandem-odd"):
        folder.mkdir()
    (target / LOCK_NAME).touch()
    (parent / "tandem-link").symlink_to(target)
    (parent / "tandem-file").touch()
    (parent / "tandem-lock-is-a-link" / LOCK_NAME).symlink_to(target / LOCK_NAME)
    os.mkfifo(parent / "tandem-odd" / LOCK_NAME)
    before = sorted(parent.iterdir())
    remove_stale(parent)
    assert sorted(parent.iterdir()) == before
    (parent / "tandem-of-another-user").mkdir()
    (parent / "tandem-of-another-user" / LOCK_NAME).touch()
    with monkeypatch.context() as context:
        context.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
        remove_stale(parent)
    assert (parent / "tandem-of-another-user").exists()
    remove_stale(parent)
    assert sorted(parent.iterdir()) == before


def test_new_directory_is_never_seen_with_an_unlocked_file(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    flock = module.fcntl.flock

    def look_first(descriptor: int, operation: int) -> None:
        seen.append([path.name for path in parent.glob("tandem-*/*")])
        flock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", look_first)
    with run_directory() as folder:
        assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
    assert seen == [[f"{LOCK_NAME}.new"]]
