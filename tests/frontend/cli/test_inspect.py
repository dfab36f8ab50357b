"""`tandem inspect`: its tables, rendered directly and against a frontend with a fake engine."""

import json
import re
from typing import Any

import pytest

from tandem.frontend.cli.inspect import render
from tandem.frontend.cli.main import main
from tests.fakes.engine import FakeEngine
from tests.fakes.http_server import Answer, scripted_server
from tests.frontend.conftest import RunningServer, open_stream
from tests.support.refusals import numbers_in
from tests.support.shared_frontend import shared_fixtures

shared, engine, server = shared_fixtures()

IDLE: dict[str, Any] = {
    "policy": "fcfs",
    "pause": {"is_paused": False, "status": "running", "mode": None, "new_requests": None},
    "is_sleeping": False,
    "queue": {"waiting": 0, "oldest_wait": 0.0, "unlisted": 0},
    "rows": {"running": 0, "total": 64},
    "pages": {"used": 0, "free": 4096, "settling": 0, "total": 4096, "page_size": 16},
    "prefix_cache": {
        "pages": 0, "queried_tokens": 0, "hit_tokens": 0, "hit_rate": None, "evicted_pages": 0,
        "checkpoints": 0, "max_checkpoints": 0, "evicted_checkpoints": 0,
    },
    "speculation": None,
    "preemptions": 0,
    "sequences": [],
    "sessions": [],
    "evicted_sessions": 0,
}  # fmt: skip
SEQUENCE = {
    "client": "ab", "request_id": 5, "state": "decode", "row": 0, "prompt_tokens": 40, "generated_tokens": 3,
    "computed_tokens": 42, "pages": 3, "shared_pages": 2, "cached_tokens": 32, "priority": -1, "preemptions": 1,
    "age": 2.345, "wait": 0.0, "session_id": "talk", "http_request_id": "req_1",
}  # fmt: skip
BUSY = {
    **IDLE,
    "policy": "priority",
    "queue": {"waiting": 300, "oldest_wait": 12.34, "unlisted": 44},
    "rows": {"running": 1, "total": 64},
    "pages": {"used": 30, "free": 4000, "settling": 2, "total": 4096, "page_size": 16},
    "prefix_cache": {
        "pages": 12, "queried_tokens": 300, "hit_tokens": 100, "hit_rate": 0.3333, "evicted_pages": 6,
        "checkpoints": 0, "max_checkpoints": 0, "evicted_checkpoints": 0,
    },
    "sequences": [
        SEQUENCE,
        {**SEQUENCE, "state": "waiting", "row": None, "request_id": 12345, "age": 1.0, "wait": 0.5, "session_id": None,
         "http_request_id": None},
    ],
    "sessions": [
        {"session_id": "talk", "busy": True, "pages": 2, "idle": 0.0},
        {"session_id": "x" * 50, "busy": False, "pages": 20, "idle": 30.06},
    ],
}  # fmt: skip


def test_render_names_adapters_if_there_are_any() -> None:
    assert "ADAPTER" not in render(BUSY)
    lines = render({**BUSY, "sequences": [{**SEQUENCE, "adapter": "sql"}, {**SEQUENCE, "adapter": None}]}).splitlines()
    table = next(index for index, line in enumerate(lines) if line.endswith("ADAPTER"))
    assert lines[table + 1].endswith("sql") and lines[table + 2].endswith("-")


@pytest.mark.parametrize(("new_requests", "words"), [("hold", "wait"), ("refuse", "refused")])
def test_render_shows_a_pause(new_requests: str, words: str) -> None:
    pause = {"is_paused": True, "status": "paused", "mode": "keep", "new_requests": new_requests}
    line = render({**IDLE, "pause": pause}).splitlines()[1]
    assert re.fullmatch(rf"pause         paused, mode keep; .*\b{words};.*/admin/resume\b.*", line)


def test_render_shows_a_sleep() -> None:
    assert re.fullmatch(r"sleep         .*/wake_up\b.*", render({**IDLE, "is_sleeping": True}).splitlines()[1])


def test_render_shows_an_idle_scheduler() -> None:
    assert {line[:14].strip(): numbers_in(line) for line in render(IDLE).splitlines()} == {
        "policy": [],
        "queue": [],
        "rows": [0, 64],
        "pages": [0, 4096, 0, 4096, 16],
        "prefix cache": [0, 0, 0, 0],
        "preemptions": [0],
        "sessions": [0, 0, 0],
    }


def test_render_shows_a_busy_scheduler() -> None:
    summary, sequences, sessions = render(BUSY).split("\n\n")
    assert "policy        priority" in summary
    numbers = {line[:14].strip(): numbers_in(line.replace("%", "")) for line in summary.splitlines()}
    assert numbers["queue"] == [300, 44, 12.3]
    assert numbers["pages"][:4] == [30, 4096, 2, 66]
    assert numbers["sessions"] == [2, 1, 0]
    assert numbers["prefix cache"] == [12, 33.3, 100, 300, 6]
    assert [" ".join(line.split()) for line in sequences.splitlines()] == [
        "STATE ROW REQUEST PROMPT OUTPUT COMPUTED CACHED PAGES SHARED PRIORITY PREEMPTED AGE WAIT SESSION HTTP REQUEST",
        "decode 0 5 40 3 42 32 3 2 -1 1 2.3 s - talk req_1",
        "waiting - 12345 40 3 42 32 3 2 -1 1 1.0 s 0.5 s - -",
    ]
    head, first, _ = sequences.splitlines()
    assert first.index("  5 ") + 3 == head.index("REQUEST") + len("REQUEST"), "numbers end where their heads do"
    assert [line.split() for line in sessions.splitlines()] == [
        ["SESSION", "BUSY", "KEPT", "IDLE"],
        ["talk", "yes", "2", "-"],
        ["x" * 37 + "...", "no", "20", "30.1", "s"],
    ]


@pytest.mark.parametrize(("adaptive", "most"), [(True, "up to 3 drafts a step"), (False, "3 drafts a step")])
def test_render_shows_drafts(adaptive: bool, most: str) -> None:
    speculation = {
        "method": "ngram", "max_drafts": 3, "adaptive": adaptive, "drafts": 20, "drafted_tokens": 50,
        "accepted_tokens": 21, "acceptance_rate": 0.42, "accepted_tokens_per_position": [12, 8, 1],
    }  # fmt: skip
    row = {**SEQUENCE, "drafted_tokens": 7, "accepted_tokens": 5}
    summary, sequences = render({**IDLE, "speculation": speculation, "sequences": [row]}).split("\n\n")
    line = f"speculation   ngram, {most}; acceptance rate 42.0% (21 of 50 drafts; by position 12, 8, 1)"
    assert line in summary.splitlines()
    head, one = [line.split() for line in sequences.splitlines()]
    assert (head[-2:], one[-2:]) == (["DRAFTED", "ACCEPTED"], ["7", "5"])
    unused = {**speculation, "drafted_tokens": 0, "acceptance_rate": None}
    assert "acceptance rate none yet" in render({**IDLE, "speculation": unused})


def test_render_shows_the_checkpoints_of_recurrent_layers() -> None:
    cache = {**BUSY["prefix_cache"], "checkpoints": 5, "max_checkpoints": 60, "evicted_checkpoints": 7}
    assert "checkpoints   5 of 60 in use, 7 evicted" in render({**BUSY, "prefix_cache": cache})


def test_render_replaces_control_characters_in_names() -> None:
    session = {"session_id": "a\x1b[2Jb\nc", "busy": False, "pages": 1, "idle": 0.0}
    assert render({**IDLE, "sessions": [session]}).splitlines()[-1].startswith("a\ufffd[2Jb\ufffdc  ")


def test_inspect_shows_a_turn_in_progress(
    server: RunningServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 1000, "stream": True, "session_id": "talk"}
    with open_stream("POST", server.url + "/v1/completions", json=body):
        engine.hold = True
        assert main(["inspect", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("policy        fcfs\n")
    assert out.splitlines()[-1].split() == ["talk", "yes", "2", "-"]
    assert err == ""


def test_watch_ends_with_an_interrupt(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("tandem.frontend.cli.inspect.time.sleep", sleep)
    assert main(["inspect", "--url", server.url, "--watch", "0.5"]) == 130
    assert waits == [0.5, 0.5]
    out = capsys.readouterr().out
    assert out.count("policy        fcfs\n") == 2
    assert "\x1b" not in out, "no terminal, nothing to clear"


@pytest.mark.parametrize(
    ("height", "last"), [(30, "xxx"), (16, "xxx"), (15, "and 2 more lines;"), (1, "and 14 more lines")]
)
def test_watch_output_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, height: int, last: str
) -> None:
    monkeypatch.setattr("tandem.frontend.cli.inspect.sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setattr("tandem.frontend.cli.inspect.time.sleep", interrupted)
    with scripted_server(Answer(200, json.dumps(BUSY).encode())) as server:
        assert main(["inspect", "--url", server.url, "--watch", "0.5"]) == 130
    out = capsys.readouterr().out
    assert out.startswith("\x1b[H\x1b[2Jpolicy        priority\n")
    lines = out.splitlines()
    assert len(lines) < max(height, 3)
    assert max(map(len, lines)) <= 60 + len("\x1b[H\x1b[2J")
    assert lines[-1].startswith(last)


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


def test_watch_interval_out_of_range_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--watch", "0"]) == 2
    error = capsys.readouterr().err
    assert "--watch" in error and 0.1 in numbers_in(error)


def test_inspect_reports_errors_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": "the engine is not ready", "type": "x", "param": None, "code": "engine_unavailable"}}
    for answer, reason in (
        (Answer(503, json.dumps(error).encode()), "the engine is not ready (503, engine_unavailable)"),
        (
            Answer(200, b'{"queue": 3}'),
            "the server's answer is not a scheduler state; use the `tandem` of the server's version",
        ),
    ):
        with scripted_server(answer) as server:
            assert main(["inspect", "--url", server.url]) == 1
        assert capsys.readouterr() == ("", f"tandem: {reason}\n")
