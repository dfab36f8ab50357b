"""Disks without room for what a command prints."""

import errno
import os
import subprocess
import sys

import pytest

from tandem.frontend.cli.ending import write_out


@pytest.mark.parametrize("argv", [["doctor"], ["serve", "--help-all"]])
def test_output_on_a_full_disk_ends_in_one_line(argv: list[str]) -> None:
    """Also where all of it is still buffered when the command ends."""
    program = f"import sys; from tandem.frontend.cli.main import main; sys.exit(main({argv}))"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    said = "tandem: the output cannot be written: No space left on device; free space there\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_a_quota_that_is_spent_names_the_file_also_without_a_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "/home/x")

    monkeypatch.setattr(sys, "stdout", None)
    assert write_out(fail) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "/home/x" in line and os.strerror(errno.EDQUOT) in line


def test_other_errors_are_not_taken_for_a_full_disk(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(number: int, place: str | None) -> int:
        raise OSError(number, "it failed", place)

    with pytest.raises(OSError, match=str(errno.EIO)):
        write_out(lambda: fail(errno.EIO, None))
    assert capfd.readouterr().err == ""
