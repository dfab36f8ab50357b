"""Interrupts of the console command."""

import sys
from types import ModuleType
from typing import Any

import pytest

from tandem.frontend.cli import main as commands
from tandem.frontend.cli.ending import INTERRUPTED
from tandem.frontend.cli.entry import main


def test_the_code_of_the_command_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "main", lambda: 7)
    assert main() == 7


def test_an_interrupt_while_modules_are_loaded_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, commands.__name__, Loading(commands.__name__))
    assert main() == INTERRUPTED
