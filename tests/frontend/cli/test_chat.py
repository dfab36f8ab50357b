"""`tandem chat` from a pipe in this process, and on a terminal in a child process."""

import io
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tandem.frontend.cli.main import main
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, until
from tests.support.refusals import numbers_in
from tests.support.scripted_server import RAW, prompts, say, write_chat_model
from tests.support.shared_frontend import shared_fixtures

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal that a session opens sends it its interrupts
from tandem.frontend.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


shared, engine, server = shared_fixtures()


class Session:
    """`tandem chat` on a terminal."""

    def __init__(self, server: RunningServer, state: Path, *flags: str) -> None:
        self.fd, terminal = pty.openpty()
        argv = [sys.executable, "-c", PROGRAM, "chat", "--url", server.url, *flags]
        environment = {**os.environ, "TERM": "dumb", "XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        )
        os.close(terminal)
        self._process = psutil.Process(self.process.pid)

    def read(self, pattern: str) -> str:
        """Read the output up to and including this text."""
        deadline = time.monotonic() + DEADLINE
        seen = b""
        while pattern.encode() not in seen:
            assert time.monotonic() < deadline, f"waited for {pattern!r}, got {seen.decode()!r}"
            if select.select([self.fd], [], [], 0.05)[0]:
                seen += os.read(self.fd, 1)
        return seen.decode()

    def write(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt_input(self, text: str) -> None:
        """Type part of a line, then Ctrl-C once the program waits for the rest.

        An interrupt between the echo and that wait would be noticed only at the next key.
        """
        self.write(text)
        self.read(text)
        until(lambda: self._process.status() == psutil.STATUS_SLEEPING, "the program waits for a key")
        self.write("\x03")

    def ask(self, line: str) -> str:
        """Send a line at the prompt; return the output up to the next prompt, without the echo."""
        self.write(line + "\n")
        return self.read(">>> ").partition("\r\n")[2].removesuffix(">>> ").replace("\r\n", "\n")

    def close(self) -> int:
        code = self.process.wait(DEADLINE)
        os.close(self.fd)
        return code


@pytest.fixture
def start(server: RunningServer, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Start a session that has reached its prompt; it is ended with the test."""
    sessions: list[Session] = []

    def start_one(*flags: str) -> Session:
        sessions.append(Session(server, tmp_path, *flags))
        sessions[-1].read(">>> ")
        return sessions[-1]

    yield start_one
    for session in sessions:
        if session.process.poll() is None:
            session.process.kill()
            session.close()


@pytest.fixture
def session(start: Callable[..., Session]) -> Session:
    return start()


def test_chat_answers_one_question_from_a_pipe(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(engine, "use os.path.join")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffhow do I\njoin two paths?"))
    assert main(["chat", "--url", server.url, "--system", "you know Python"]) == 0
    assert capsys.readouterr() == ("use os.path.join\n", "")
    assert prompts(engine) == ["system: you know Python\nuser: how do I\njoin two paths?\nassistant:"]


def test_chat_reports_a_refused_question_from_a_pipe(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert main(["chat", "--url", server.url, "--model", "other"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"tandem: .*'other'.*'fake-model' \(404, model_not_found\)\n", err)


def test_chat_keeps_the_conversation_and_runs_commands(session: Session, engine: FakeEngine) -> None:
    say(engine, "one")
    assert session.ask("first") == "one\n"
    say(engine, "two")
    assert session.ask("second") == "two\n"
    assert prompts(engine)[1] == "user: first\nassistant: one\nuser: second\nassistant:"
    assert "/system TEXT" in session.ask("/system")
    assert session.ask("/system be long").startswith("set ")
    assert session.ask('/system ""').startswith("removed ")
    assert session.ask("/system be brief").startswith("set")
    assert session.ask("/system").endswith(": be brief\n")
    assert numbers_in(session.ask("/reset")) == [2]
    session.write('"""a block\n')
    session.read("... ")
    assert session.ask('of lines"""') == "two\n"
    assert prompts(engine)[2] == "system: be brief\nuser: a block\nof lines\nassistant:"
    assert "/quit" in session.ask("/help")
    assert re.fullmatch(r"/nonsense .*/help .*\n", session.ask("/nonsense"))
    assert session.ask("") == ""
    session.write("/quit\n")
    assert session.close() == 0
    assert len(engine.submits) == 3


def test_clear_forgets_the_conversation_as_reset_does(session: Session, engine: FakeEngine) -> None:
    say(engine, "one")
    session.ask("first")
    assert numbers_in(session.ask("/clear")) == [1]
    session.ask("second")
    assert prompts(engine)[1] == "user: second\nassistant:"


def test_chat_continues_after_an_error_of_one_line(session: Session, engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("stop here and stop there").ids
    engine.break_after = 2
    answer = session.ask("first")
    # Where the end overtakes the first token nothing was shown before the line, and it names the HTTP status, too.
    assert answer.splitlines()[-1].startswith("tandem: broken by the fake engine") and answer.count("tandem:") == 1
    engine.break_after = None
    say(engine, "two")
    assert session.ask("second") == "two\n"
    assert prompts(engine)[1] == "user: second\nassistant:", "what failed is not part of the conversation"
    session.write("\x04")
    assert session.close() == 0


def test_interrupt_stops_the_answer_but_not_the_chat(session: Session, engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("one two three four five six " * 200).ids
    engine.step_seconds = 0.02
    session.write("count\n")
    session.read("three")
    session.write("\x03")
    assert session.read(">>> ").endswith("\r\n(stopped)\r\n>>> ")
    until(lambda: engine.num_running == 0, "the engine is told")
    engine.step_seconds = 0.001
    say(engine, "done")
    session.interrupt_input("half a line")
    assert session.read(">>> ").endswith("/quit leaves)\r\n>>> ")
    assert session.ask("and then?") == "done\n"
    assert prompts(engine)[1].startswith("user: count\nassistant: one two three")
    assert prompts(engine)[1].endswith("\nuser: and then?\nassistant:")


def test_lines_typed_while_an_answer_streams_are_the_next_questions(session: Session, engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("one two three four five six " * 4).ids
    engine.step_seconds = 0.02
    session.write("count\n")
    session.read("one two")
    engine.hold = True
    session.write("second\nthi")
    engine.hold = False
    first = "one two" + session.read(">>> ").replace("\r\n", "\n").removesuffix(">>> ")
    assert first == "one two three four five six " * 4 + "\n", "the answer has nothing between its words"
    assert session.read("\n").rstrip() == "second"
    session.read(">>> ")
    session.write("rd\n")
    assert session.read("\n").rstrip() == "third"
    session.read(">>> ")
    asked = [prompt.rpartition("user: ")[2] for prompt in prompts(engine)]
    assert asked == ["count\nassistant:", "second\nassistant:", "third\nassistant:"]


def test_a_stopped_answer_has_its_counts(start: Callable[..., Session], engine: FakeEngine) -> None:
    session = start("--usage")
    engine.script = lambda _: RAW.encode("one two three four five six " * 200).ids
    engine.step_seconds = 0.02
    session.write("count\n")
    session.read("three")
    session.write("\x03")
    counts = re.search(r"(\d+) tokens in, (\d+) out, first after .* stopped", session.read(">>> "))
    assert counts is not None
    assert int(counts[1]) == len(RAW.encode(prompts(engine)[0]).ids)
    assert int(counts[2]) >= len(RAW.encode("one two three").ids)


def test_an_answer_that_is_cut_says_so(start: Callable[..., Session], engine: FakeEngine) -> None:
    session = start("--max-tokens", "2")
    engine.script = lambda _: RAW.encode("one two three").ids
    assert re.search(r"\btandem: .*\b2 tokens;.* --max-tokens\n$", session.ask("count"))


def test_the_history_is_kept_across_runs(start: Callable[..., Session], tmp_path: Path, engine: FakeEngine) -> None:
    say(engine, "yes")
    first = start()
    assert first.ask("remember this") == "yes\n"
    first.write("/quit\n")
    assert first.close() == 0
    path = tmp_path / "tandem" / "chat_history"
    assert path.read_text() == "remember this\n/quit\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = start()
    second.write("\x10\x10")  # Ctrl-P twice, as the Up key
    second.read("remember this")
    second.write("\n")
    second.read(">>> ")
    assert prompts(engine)[1] == prompts(engine)[0]
    third = start("--no-history")
    assert third.ask("a secret") == "yes\n"
    assert "a secret" not in path.read_text()


def test_a_history_that_cannot_be_kept_is_reported(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "tandem").write_text("a file where the directory should be")
    session = Session(server, tmp_path)
    assert re.search(r"tandem: .*\bhistory: ", session.read(">>> "))
    session.write("\x04")
    assert session.close() == 0


def test_control_characters_are_not_written_to_a_terminal(
    session: Session, engine: FakeEngine, server: RunningServer, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    say(engine, "a\x1b[2Jb\tc")
    assert session.ask("x") == "a\ufffd[2Jb\tc\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "a\x1b[2Jb\tc\n"
