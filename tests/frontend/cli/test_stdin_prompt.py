"""Prompts from stdin, and what is refused before anything is sent."""

import io
import sys

import pytest

from tandem.frontend.cli.main import main
from tandem.frontend.cli.stdin_prompt import NoPromptError, read_prompt
from tandem.protocol.errors import ExitCode


@pytest.mark.parametrize("text", ["x", "  x\n", "two\nlines"])
def test_prompt_is_the_text_as_it_was_piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert read_prompt() == text


@pytest.mark.parametrize(
    ("stdin", "reason"),
    [
        (io.StringIO(""), "empty"),
        (io.StringIO(" \n\t"), "empty"),
        (io.StringIO("\ufeff\n"), "empty"),
        (None, "empty"),
        (io.TextIOWrapper(io.BytesIO(b"ok \xff"), encoding="utf-8"), "utf-8"),
    ],
)
def test_stdin_without_a_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO | None, reason: str
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(NoPromptError, match=reason):
        read_prompt()


def test_folder_as_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Folder(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            raise IsADirectoryError(21, "Is a directory")

    monkeypatch.setattr(sys, "stdin", Folder())
    with pytest.raises(NoPromptError, match="directory"):
        read_prompt()


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("stdin", [io.StringIO(""), io.StringIO("\n"), None])
def test_commands_send_nothing_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, stdin: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    # Nothing listens there: a request would end with exit code 1.
    assert main([command, "--url", "127.0.0.1:1"]) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert (out, "nothing was" in err) == ("", True)
