"""`tandem complete` against a frontend and a fake engine."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.cli.complete import DEFAULT_MAX_TOKENS
from tandem.frontend.cli.main import main
from tests.fakes.engine import FakeEngine
from tests.fakes.http_server import Answer, scripted_server
from tests.frontend.conftest import DEADLINE, RunningServer
from tests.support.broken_stream import LONG, slow_down
from tests.support.refusals import numbers_in
from tests.support.scripted_server import RAW, say
from tests.support.shared_frontend import shared_fixtures

ROOT = Path(__file__).parents[3]
PROGRAM = "import sys; from tandem.frontend.cli.main import main; sys.exit(main(sys.argv[1:]))"
TEXT = "how do I join two paths? 你好 🙂"

shared, engine, server = shared_fixtures()


def complete(server: RunningServer, *flags: str) -> int:
    return main(["complete", "--url", server.url, *flags])


def test_complete_writes_only_the_answer_to_stdout(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    say(engine, TEXT)
    assert complete(server, "--max-tokens", "100", "x") == 0
    assert capsys.readouterr() == (TEXT + "\n", "")


def test_complete_asks_for_a_prompt_on_a_terminal(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(engine, TEXT)
    typed = io.StringIO("the quick brown fox\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    assert complete(server) == 0
    answer, hint = capsys.readouterr()
    assert answer == TEXT + "\n" and "Ctrl-D" in hint


def test_complete_reads_stdin_and_writes_usage_to_stderr(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(engine, "one two\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffthe quick brown fox"))
    assert complete(server, "--max-tokens", "100", "--usage") == 0
    out, err = capsys.readouterr()
    assert out == "one two\n"
    prompt, answer = len(RAW.encode("the quick brown fox").ids), len(RAW.encode("one two\n").ids) + 1
    # An answer that comes all at once, as on a machine with other work, has no tokens/s.
    times = r"first after \d+\.\d\d s(, [\d.]+ tokens/s)?"
    assert re.fullmatch(rf"{prompt} tokens in, {answer} out, {times}, ended by stop\n", err), err


def test_sampling_flags_become_request_fields(server: RunningServer, engine: FakeEngine) -> None:
    flags = (
        *("--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1"),
        *("--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--seed", "5"),
    )
    assert complete(server, *flags, "--stop", "never", "--stop", "ever", "x") == 0
    sampling = engine.submits[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)


def test_refused_request_prints_one_line(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(server, "--model", "other", "x") == 1
    reason = "the model 'other' does not exist; this server has 'fake-model' (404, model_not_found)"
    assert capsys.readouterr() == ("", f"tandem: {reason}\n")


def test_an_answer_cut_at_the_limit_says_so(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    say(engine, "one two three")
    assert complete(server, "--max-tokens", "2", "x") == 0
    error = capsys.readouterr().err
    assert numbers_in(error) == [2] and "--max-tokens" in error
    assert complete(server, "x") == 0
    assert capsys.readouterr() == ("one two three\n", "")
    assert engine.submits[-1].sampling.max_tokens == DEFAULT_MAX_TOKENS


def test_a_long_prompt_gets_the_room_that_is_left(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "one " * 1100
    say(engine, "two")
    assert complete(server, prompt) == 0
    assert capsys.readouterr() == ("two\n", "")
    assert engine.submits[0].sampling.max_tokens == engine.facts.max_len - len(RAW.encode(prompt).ids)
    assert complete(server, "--max-tokens", "2000", prompt) == 1
    assert engine.facts.max_len in numbers_in(capsys.readouterr().err)


def test_json_that_is_cut_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema").write_text("{}")
    flags = ("--model", "m", "--json-schema", str(tmp_path / "schema"), "x")
    for text, reason, code in (
        ('{"a": ', "length", 1),
        ('{"a": 1}', "length", 0),
        ('{"a": 1}', "stop", 0),
    ):
        choice = {"index": 0, "text": text, "finish_reason": reason}
        usage = {"choices": [], "usage": {"completion_tokens": 9}}
        body = events({"choices": [choice], "usage": None}, usage, b"[DONE]")
        with scripted_server(Answer(200, body)) as server:
            assert main(["complete", "--url", server.url, *flags]) == code
        out, err = capsys.readouterr()
        assert out == text + "\n"
        assert bool(re.fullmatch(r"tandem: .*\bJSON\b.*\b9 tokens\b.* --max-tokens\n", err)) == bool(code)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_blanks_at_the_start_are_not_printed_on_a_terminal(
    server: RunningServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(engine, " \n  one two")
    assert complete(server, "x") == 0
    assert capsys.readouterr().out == " \n  one two\n", "a program may append the answer to its prompt"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert complete(server, "x") == 0
    assert sys.stdout.getvalue() == "one two\n"


class BreakAtFirstWrite(io.StringIO):
    """Output that breaks the engine's answer once its beginning has been written."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine

    def write(self, text: str) -> int:
        self._engine.break_after = 1
        return super().write(text)


def test_error_within_the_stream_prints_one_line(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(engine, TEXT * LONG)
    slow_down(engine)
    monkeypatch.setattr(sys, "stdout", BreakAtFirstWrite(engine))
    assert complete(server, "--max-tokens", str(LONG), "x") == 1
    out, err = sys.stdout.getvalue(), capsys.readouterr().err
    assert out != "\n"
    assert (TEXT * LONG).startswith(out.rstrip("\n"))
    assert out.endswith("\n")
    assert err == "tandem: broken by the fake engine\n"


def events(*parts: object) -> bytes:
    return b"".join(
        b"data: %b\n\n" % (part if isinstance(part, bytes) else json.dumps(part).encode()) for part in parts
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(200, events({"choices": []})), "connection ended"),
        (Answer(200, events(b"{")), "event that"),
        (Answer(200, events({"error": 7})), "error: 7\n"),
        (Answer(500, b"<h1>\nno\n</h1>"), "500: <h1> no </h1>"),
        (Answer(401, b'{"error":{"message":"no","code":"k"}}'), "no (401, k); give --api-key"),
        (Answer(400, b'{"error":{"message":"\\u001b[2J"}}'), "tandem: \ufffd[2J (400)"),
        (Answer(0), "broke"),
    ],
)
def test_invalid_response_prints_one_line(answer: Answer, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(answer) as server:
        assert main(["complete", "--url", server.url, "--model", "m", "x"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tandem: ")
    assert reason in err


def test_missing_model_and_missing_server_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(Answer(200, b'{"data": []}')) as server:
        assert main(["complete", "--url", server.url + "/v1/", "x"]) == 1
        assert server.requests == [("/v1/models", b"")]
    assert "--model" in capsys.readouterr().err
    assert main(["complete", "--url", server.url, "x"]) == 1
    error = capsys.readouterr().err
    assert server.url in error and "`tandem serve`" in error


@pytest.mark.parametrize(
    ("flag", "variable", "sent"), [("f", "", "f"), ("f", "e", "f"), ("", "e", "e"), ("", "one, two", "one")]
)
def test_api_key_is_read_from_the_flag_or_the_environment(
    flag: str, variable: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TANDEM_API_KEY", variable)
    with scripted_server(Answer(200, events({"choices": []}, b"[DONE]"))) as server:
        assert main(["complete", "--url", server.url, "--model", "m", *(["--api-key", flag] if flag else []), "x"]) == 0
        assert server.headers[0]["authorization"] == f"Bearer {sent}"


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_schema_flag_becomes_response_format(codec: str, tmp_path: Path) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "schema").write_text(json.dumps(schema), encoding=codec)
    with scripted_server(Answer(200, events({"choices": []}, b"[DONE]"))) as server:
        main(["complete", "--url", server.url, "--model", "m", "--json-schema", str(tmp_path / "schema"), "x"])
        body = json.loads(server.requests[0][1])
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["schema"] == schema


def test_invalid_flag_value_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema").write_text("{")
    for flags, reason in (
        (("--json-schema", str(tmp_path / "schema")), "is not JSON"),
        (("--json-schema", str(tmp_path / "none")), "cannot be read"),
        (("--url", "ftp://127.0.0.1:8000"), "start with http:// or https://"),
        (("--temperature", "9"), "argument --temperature: must be between 0 and 2, not 9.0"),
        (("--top-k", "-2"), "argument --top-k: must be between -1 and"),
        (("--max-tokens", "0"), "argument --max-tokens: must be between 1 and"),
        (("--seed", "x"), "argument --seed: invalid int value: 'x'"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["complete", *flags, "x"])
        assert caught.value.code == 2
        assert reason in capsys.readouterr().err
    assert main(["complete", "--timeout", "0", "x"]) == 2


def test_closed_stdout_ends_the_command(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("one two three " * 200).ids
    command = [sys.executable, "-c", PROGRAM, "complete", "--url", server.url, "--max-tokens", "1000", "x"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(3) == "one"
        process.stdout.close()
        assert process.wait(DEADLINE) == 1
        assert process.stderr.read() == ""
