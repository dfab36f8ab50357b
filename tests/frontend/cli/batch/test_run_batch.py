"""`tandem run-batch` against a frontend and a fake engine, including a run that is killed."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.cli.batch import files
from tandem.frontend.cli.main import main
from tests.fakes.engine import FakeEngine
from tests.fakes.http_server import Answer, scripted_server
from tests.frontend.conftest import DEADLINE, RunningServer, until
from tests.support.refusals import numbers_in
from tests.support.shared_frontend import shared_fixtures

ROOT = Path(__file__).parents[4]
PROGRAM = "import sys; from tandem.frontend.cli.main import main; sys.exit(main(sys.argv[1:]))"

shared, engine, server = shared_fixtures()


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    fields = {"model": "fake-model", "prompt": "the quick brown fox", "max_tokens": 8, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields}) + "\n"


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def argv(server: RunningServer, paths: tuple[Path, Path], *flags: str) -> list[str]:
    return ["run-batch", "--url", server.url, *flags, *map(str, paths)]


def totals(printed: str) -> list[float]:
    """Return the numbers of requests, successes, failures and requests left in the last line that was printed."""
    return numbers_in(printed.splitlines()[-1])


def results(path: Path) -> dict[str, Any]:
    """By custom_id, each of which is there once."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


def test_batch_writes_a_result_for_every_request(
    server: RunningServer, engine: FakeEngine, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text("".join(line(f"r{number}", max_tokens=number + 1) for number in range(12)))
    assert main(argv(server, paths, "--concurrency", "4")) == 0
    found = results(paths[1])
    assert found.keys() == {f"r{number}" for number in range(12)}
    for number in range(12):
        response = found[f"r{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == number + 1
        assert found[f"r{number}"]["error"] is None
    assert len({one["id"] for one in found.values()}) == len({one["response"]["request_id"] for one in found.values()})
    out, err = capsys.readouterr()
    assert out == ""
    assert "12 succeeded, 0 failed;" in err
    assert f"{sum(range(1, 13))} out" in err
    assert totals(err) == [12, 12, 0, 0]
    assert len(engine.submits) == 12


def test_batch_records_failures_and_exits_with_1(
    server: RunningServer, engine: FakeEngine, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text(line("good") + line("hot", temperature=3) + line("other", model="nobody"))
    assert main(argv(server, paths)) == 1
    found = results(paths[1])
    assert {name: one["response"]["status_code"] for name, one in found.items()} == {
        "good": 200,
        "hot": 400,
        "other": 404,
    }
    assert found["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert re.search(r"\b1 succeeded, 2 failed \(1 .*400, 1 .*404\)", capsys.readouterr().err)
    before = paths[1].read_bytes()
    assert main(argv(server, paths)) == 1, "a failure of an earlier run is one of the batch still"
    assert paths[1].read_bytes() == before
    assert len(engine.submits) == 1


def test_batch_with_invalid_files_sends_nothing(
    server: RunningServer, engine: FakeEngine, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text(line("a") + line("a"))
    assert main(argv(server, paths)) == 2
    assert re.search(r"in\.jsonl:2: .*'a'.*\b1\b", capsys.readouterr().err)
    paths[0].write_text(line("a"))
    paths[1].write_text('{"id":"i","custom_id":"z","response":null,"error":{"code":"c","message":"m"}}\n')
    assert main(argv(server, paths)) == 2
    assert "'z'" in capsys.readouterr().err
    assert engine.submits == []


def start(server: RunningServer, paths: tuple[Path, Path], *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, *argv(server, paths, *flags)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def has_lines(path: Path, count: int) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


def test_batch_resumes_after_it_was_killed(
    server: RunningServer, engine: FakeEngine, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.step_seconds = 0.005
    paths[0].write_text("".join(line(f"r{number}", max_tokens=20 + number) for number in range(40)))
    with start(server, paths, "--concurrency", "3") as process:
        until(has_lines(paths[1], 5), "some results are written")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    written = paths[1].read_bytes()
    done = written.count(b"\n")
    before = results(paths[1])
    assert 5 <= done < 40
    # As if it had died within a write.
    paths[1].write_bytes(written + b'{"id":"batch_req_1","custom_id":"r39","resp')
    engine.step_seconds = 0.001
    until(lambda: engine.num_running == 0, "what the dead client left has ended")
    assert main(argv(server, paths)) == 0
    assert results(paths[1]).keys() == {f"r{number}" for number in range(40)}
    assert paths[1].read_bytes().startswith(written)
    limits = Counter(submit.sampling.max_tokens for submit in engine.submits)
    assert [limits[20 + int(name[1:])] for name in before] == [1] * done, "what was done is not sent again"
    assert totals(capsys.readouterr().err) == [40, 40, 0, 0]


def test_interrupted_batch_tells_how_to_continue(
    server: RunningServer, engine: FakeEngine, paths: tuple[Path, Path]
) -> None:
    paths[0].write_text(line("quick", max_tokens=1) + line("endless", max_tokens=1900))
    engine.step_seconds = 0.05
    with start(server, paths) as process:
        until(has_lines(paths[1], 1), "the quick one is done")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert totals(err) == [2, 1, 0, 1]
    assert results(paths[1]).keys() == {"quick"}
    until(lambda: engine.num_running == 0, "the engine is told")


def test_unreachable_server_is_not_recorded_as_a_result(
    server: RunningServer, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text(line("a") + line("b"))
    assert main(["run-batch", "--url", "http://127.0.0.1:1", "--retries", "0", *map(str, paths)]) == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:1" in err
    assert totals(err) == [2, 0, 0, 2]
    assert paths[1].read_bytes() == b""
    assert main(argv(server, paths)) == 0


def test_a_request_that_a_busy_server_turned_away_is_left_for_the_next_run(
    paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text(line("a") + line("b"))
    busy = Answer(409, b'{"error":{"message":"the session is busy","code":"session_busy"}}')
    run = ["run-batch", "--concurrency", "1", "--retries", "0", *map(str, paths)]
    with scripted_server(Answer(200), busy) as server:
        assert main([*run, "--url", server.url]) == 1
    err = capsys.readouterr().err
    assert re.search(r"\btandem: .*\b1; .*'b': the session is busy \(409, session_busy\)\n", err)
    assert totals(err) == [2, 1, 0, 1]
    assert results(paths[1]).keys() == {"a"}
    with scripted_server(Answer(500), Answer(200)) as server:
        assert main([*run, "--url", server.url, "--retries", "1"]) == 0
        assert len(server.requests) == 2
    assert results(paths[1])["b"]["response"]["status_code"] == 200


def test_a_refused_key_ends_the_run_and_leaves_its_requests(
    paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text("".join(line(f"r{number}") for number in range(5)))
    run = ["run-batch", "--concurrency", "1", *map(str, paths)]
    refusal = Answer(401, b'{"error":{"message":"a valid API key is required","code":"invalid_api_key"}}')
    with scripted_server(Answer(200), refusal) as server:
        assert main([*run, "--url", server.url]) == 1
        assert len(server.requests) == 2
    err = capsys.readouterr().err
    assert re.search(r"\btandem: .*\(401, invalid_api_key\);.* --api-key .*TANDEM_API_KEY\n", err)
    assert totals(err) == [5, 1, 0, 4]
    with scripted_server(Answer(200)) as server:
        assert main([*run, "--url", server.url]) == 0
    assert results(paths[1]).keys() == {f"r{number}" for number in range(5)}


def test_empty_batch_succeeds(paths: tuple[Path, Path]) -> None:
    paths[0].write_text("\n")
    assert main(["run-batch", *map(str, paths)]) == 0


def test_a_disk_that_is_full_ends_the_run_in_a_line_and_a_second_run_goes_on(
    server: RunningServer, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths[0].write_text("".join(line(f"r{number}") for number in range(6)))
    written: list[int] = []

    def write(file: int, data: memoryview) -> int:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real(file, data))
        return written[-1]

    real = os.write
    monkeypatch.setattr(files.os, "write", write)
    assert main(argv(server, paths, "--concurrency", "3")) == 1
    said = capsys.readouterr().err
    assert f"tandem: {paths[1]} " in said and os.strerror(errno.ENOSPC) in said
    assert totals(said) == [6, 2, 0, 4]
    monkeypatch.setattr(files.os, "write", real)
    assert main(argv(server, paths)) == 0
    assert results(paths[1]).keys() == {f"r{number}" for number in range(6)}
