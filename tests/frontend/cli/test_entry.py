"""Interrupts of the console command, and disks without room for what it prints."""

import errno
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tandem.frontend.cli import main as commands
from tandem.frontend.cli.entry import INTERRUPTED, main, write_out


def test_the_code_of_the_command_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "main", lambda: 7)
    assert main() == 7


def test_an_interrupt_while_modules_are_loaded_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, commands.__name__, Loading(commands.__name__))
    assert main() == INTERRUPTED


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
