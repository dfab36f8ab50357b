"""Complete runs against a scripted server."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.bench_serving import main
from benchmarks.measuring import results
from tandem.frontend.cli.bench.client import ERROR_PAUSE, Job, take_part
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.record import Share
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tests.fakes.completions_server import CompletionsServer

GUARD_SECONDS = 120.0
WORKLOAD = Workload(seed=3, input_len=Span(2, 6), output_len=Span(1, 9), prompt_ids=Span(10, 50))


async def share_of(
    server: CompletionsServer, load: Load, process: int = 0, processes: int = 1, timeout: float = 60.0
) -> Share:
    job = Job(
        [Endpoint("127.0.0.1", server.port, "/v1/completions")], Dialect("m", token_ids=True), WORKLOAD, load, timeout
    )
    return await take_part(job, process, processes, lambda: None, asyncio.get_running_loop().time)


def run(server: CompletionsServer, load: Load, processes: int = 1, timeout: float = 60.0) -> list[Share]:
    """Run a load against a server, its client processes one after the other in this process."""

    async def everything() -> list[Share]:
        async with server, asyncio.timeout(GUARD_SECONDS):
            return [await share_of(server, load, process, processes, timeout) for process in range(processes)]

    return asyncio.run(everything())


def errors(shares: list[Share]) -> list[str | None]:
    return [record.error for share in shares for record in share.records]


def test_tokens_are_counted_exactly() -> None:
    server, load = CompletionsServer(), Load("closed", 5, requests=4)
    (share,) = run(server, load)
    asked = {index: WORKLOAD.request("closed", index) for index in range(20)}
    assert errors([share]) == [None] * 20
    assert {record.index: record.tokens for record in share.records} == {i: r.max_tokens for i, r in asked.items()}
    assert {record.index: record.prompt_tokens for record in share.records} == {
        i: len(r.prompt) for i, r in asked.items()
    }
    for record in share.records:
        assert len(record.gaps) == max(0, record.tokens - 3), "all but the three of the first event"
        assert record.first is not None and record.last is not None
        assert record.start <= record.first <= record.last <= record.end
    assert server.connections == 5, "one a stream, kept alive"
    assert {(body["temperature"], body["ignore_eos"], body["stream"]) for body in server.bodies} == {(0.0, True, True)}


@pytest.mark.parametrize("load", [Load("closed", 6, requests=2), Load("open", rate=400.0, requests=12)])
def test_requests_do_not_depend_on_the_number_of_processes(load: Load) -> None:
    def prompts(processes: int) -> list[list[int]]:
        server = CompletionsServer()
        run(server, load, processes)
        return sorted(body["prompt"] for body in server.bodies)

    assert prompts(1) == prompts(3) == sorted(WORKLOAD.request(load.label, index).prompt for index in range(12))


def test_requests_of_a_rate_wait_for_a_place_in_flight() -> None:
    server = CompletionsServer()
    (share,) = run(server, Load("open", rate=10_000.0, requests=12, in_flight=2))
    assert errors([share]) == [None] * 12
    for record in share.records:
        assert sum(other.start <= record.start < other.end for other in share.records) <= 2
    assert server.connections <= 2


def test_refused_requests_are_counted_and_keep_the_connection() -> None:
    server = CompletionsServer("good", "refuse", "good", "refuse", "refuse", "good")
    (share,) = run(server, Load("closed", 1, requests=6))
    assert errors([share]) == [None, "HTTP 503", None, "HTTP 503", "HTTP 503", None]
    assert share.records[1].detail == '{"error":{"message":"full"}}'
    assert server.connections == 1
    assert share.records[2].start - share.records[1].end >= ERROR_PAUSE * 0.9


def test_broken_replies_are_errors_and_do_not_affect_later_requests() -> None:
    server = CompletionsServer("cut", "error", "good")
    (share,) = run(server, Load("closed", 1, requests=3))
    assert errors([share]) == ["EOFError", "error event", None]


def test_connection_closed_while_idle_is_not_an_error() -> None:
    server = CompletionsServer("drop")
    (share,) = run(server, Load("closed", 1, requests=3))
    assert errors([share]) == [None] * 3 and len(server.bodies) == 3


def test_hanging_request_times_out() -> None:
    (share,) = run(CompletionsServer("hang", "good"), Load("closed", 1, requests=2), timeout=2.0)
    assert errors([share]) == ["timed out", None]


def test_unreachable_server_is_an_error() -> None:
    server = CompletionsServer()
    server.port = 1
    (share,) = asyncio.run(_gather_one(server, Load("closed", 1, requests=1)))
    assert share.records[0].error == "ConnectionRefusedError"


async def _gather_one(server: CompletionsServer, load: Load) -> list[Share]:
    return [await share_of(server, load)]


def test_duration_ends_a_closed_loop() -> None:
    for duration in (0.2, 2.0, 20.0):  # a busy machine may have no time for a second request in the first
        (share,) = run(CompletionsServer(), Load("closed", 2, duration=duration))
        if len(share.records) > 2:
            break
    assert len(share.records) > 2 and set(errors([share])) == {None}
    assert sorted(record.index for record in share.records)[:2] == [0, 1]


def test_command_line_run_saves_its_results(
    served: CompletionsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check two spawned clients, two URLs and two levels: every token in the file, every request at the server."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    url = f"http://127.0.0.1:{served.port}"
    flags = ["--clients", "2", "--input-len", "2:6", "--output-len", "7", "--save", "serving", "--requests", "3"]
    main(["--url", f"{url},{url}/v1", "--model", "m", "--streams", "1", "4", *flags])
    saved = json.loads((tmp_path / "serving.json").read_text())
    assert saved["config"]["output_len"] == "7" and saved["config"]["streams"] == [1, 4]
    one, four = saved["figures"]["levels"]
    assert (one["completed"], one["output_tokens"]) == (3, 21)
    assert (four["completed"], four["output_tokens"], four["errors"]) == (12, 84, {})
    assert four["counted_by"] == {"usage": 12} and four["other_length"] == 0
    assert len(four["client_cpu_percent"]) == 2 and four["ttft_ms"]["count"] == 12
    assert len(served.bodies) == 3 + 1 + 12 + 4, "levels and their warm-ups"
    assert four["prompt_tokens"] == sum(len(body["prompt"]) for body in served.bodies[-12:])
    assert "4 streams" in capsys.readouterr().out


def test_server_that_refuses_everything_ends_the_run(served: CompletionsServer) -> None:
    served.ways = ["refuse"]
    with pytest.raises(SystemExit, match="HTTP 503"):
        main(["--url", f"http://127.0.0.1:{served.port}", "--model", "m", "--streams", "1", "--clients", "1"])
