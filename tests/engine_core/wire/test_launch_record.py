"""The record of launches outlives its process, and takes no room without end."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.engine_core.wire import launch_record
from tandem.engine_core.wire.launch_record import NUM_ENTRIES, NUM_FILES, LaunchRecord

KILLED = """
import os, signal, sys
from pathlib import Path
from tandem.engine_core.wire.launch_record import LaunchRecord
record = LaunchRecord(Path(sys.argv[1]))
record.open()
record.note(b"f" * 16, 7)
record.note(b"g" * 16, 8)
record.note(b"f" * 16, 2**64 - 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(folder: Path) -> LaunchRecord:
    record = LaunchRecord(folder)
    record.open()
    return record


def test_a_process_that_is_killed_right_after_a_note_leaves_it(tmp_path: Path) -> None:
    folder = tmp_path / "launches"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    record = opened(folder)
    assert record.launched(b"f" * 16) == [7, 2**64 - 1]
    assert record.launched(b"g" * 16) == [8]
    assert record.launched(b"h" * 16) == []
    record.close()
    assert folder.stat().st_mode & 0o077 == 0


def test_the_own_requests_are_not_those_of_a_lost_engine(tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.note(b"f" * 16, 7)
    assert record.launched(b"f" * 16) == []
    record.close()


@pytest.mark.parametrize("client", [b"", b"\0", b"short", b"f" * 255])
def test_identities_are_distinct_up_to_16_bytes(client: bytes, tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.note(client, 7)
    record.close()
    after = opened(tmp_path)
    assert after.launched(client) == ([7] if any(client) else [])
    after.close()


def test_the_latest_requests_are_kept(tmp_path: Path) -> None:
    record = opened(tmp_path)
    for number in range(NUM_ENTRIES + 10):
        record.note(b"f" * 16, number)
    record.close()
    after = opened(tmp_path)
    assert sorted(after.launched(b"f" * 16)) == list(range(10, NUM_ENTRIES + 10))
    after.close()


def test_lives_without_a_frontend_in_between_hide_nothing_and_old_files_are_removed(tmp_path: Path) -> None:
    for number in range(12):
        record = opened(tmp_path)
        record.note(b"life %010d" % number, number)
        record.close()
    after = opened(tmp_path)
    known = [number for number in range(12) if after.launched(b"life %010d" % number) == [number]]
    after.close()
    assert known == list(range(12 - NUM_FILES, 12))
    assert len(list(tmp_path.iterdir())) == NUM_FILES + 1


def test_a_file_of_another_size_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.note(b"f" * 16, 7)
    record.close()
    (file,) = tmp_path.iterdir()
    os.truncate(file, 24 + 5)
    after = opened(tmp_path)
    assert after.launched(b"f" * 16) == [7]
    after.close()


def test_a_full_disk_costs_the_record_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch_record.os, "posix_fallocate", full)
    record = opened(tmp_path)
    record.note(b"f" * 16, 7)
    record.close()
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = [tmp_path / name for name in ("README", "000000000001~", "zzz", "7")]
    for file in others:
        file.write_bytes(b"f" * 48)
    (tmp_path / "lost+found").mkdir()
    for _ in range(NUM_FILES + 2):
        record = opened(tmp_path)
        assert record.launched(b"f" * 16) == []
        record.note(b"life", 7)
        record.close()
    after = opened(tmp_path)
    assert after.launched(b"life") == [7] * NUM_FILES
    after.close()
    assert all(file.read_bytes() == b"f" * 48 for file in others)
    assert caplog.messages == []


@pytest.mark.parametrize("number", [1, 2, 3, 999_999_999_999])
def test_a_folder_with_the_name_of_a_file_does_not_stop_the_record(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{number:012}").mkdir()
    for _ in range(NUM_FILES + 1):
        caplog.clear()
        record = opened(tmp_path)
        record.note(b"life", 7)
        record.close()
        (message,) = caplog.messages
        assert f"{number:012}" in message
    after = opened(tmp_path)
    assert after.launched(b"life") == [7] * NUM_FILES
    after.close()
