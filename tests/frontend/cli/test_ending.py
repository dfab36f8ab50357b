"""Disks without room for what a command prints."""

import errno
import subprocess
import sys

import pytest

from tandem.frontend.cli.ending import write_out


def test_output_on_a_full_disk_ends_in_one_line() -> None:
    """Also where all of it is still buffered when the command ends."""
    program = "import sys; from tandem.frontend.cli.main import main; sys.exit(main(['doctor']))"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    said = "tandem: the output cannot be written: No space left on device; free space there\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_other_errors_are_not_taken_for_a_full_disk(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(number: int, place: str | None) -> int:
        raise OSError(number, "it failed", place)

    with pytest.raises(OSError, match="it failed"):
        write_out(lambda: fail(errno.EIO, None))
    assert capfd.readouterr().err == ""
