"""Complete runs against a scripted server."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.bench_serving import main
from tandem.frontend.cli.bench.client import ERROR_PAUSE, Job, take_part
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.record import Share
from tandem.frontend.cli.bench.workloads import Load, Span, Workload

GUARD_SECONDS = 60.0
WORKLOAD = Workload(seed=3, input_len=Span(2, 6), output_len=Span(1, 9), prompt_ids=Span(10, 50))


class FakeServer:
    """Streams `max_tokens` tokens, three to an event, events cut over HTTP chunks; `ways` tells how to misbehave.

    A way is taken for each request in turn, the last one for all that follow: "good", "refuse" (503), "cut" (closes
    inside the reply), "drop" (a good reply, then closes without having said so), "error" (an error event), "hang".
    """

    def __init__(self, *ways: str) -> None:
        self.ways = list(ways) or ["good"]
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FakeServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return True if the connection can take another one."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        way = self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]
        if way == "hang":
            await asyncio.sleep(GUARD_SECONDS)
        if way == "refuse":
            said = b'{"error":{"message":"full"}}'
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
            return True
        reply = b"".join(b"data: " + event + b"\n\n" for event in self._events(body, way))
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(reply), 50):
            part = reply[at : at + 50]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await asyncio.sleep(0)
        if way == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return way != "drop"

    def _events(self, body: dict[str, Any], way: str) -> list[bytes]:
        tokens = body["max_tokens"]
        if way == "error":
            return [b'{"error":{"message":"engine lost"}}', b"[DONE]"]
        events: list[Any] = []
        for at in range(0, tokens, 3):
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length" if at + 3 >= tokens else None}
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(at, min(at + 3, tokens)))
            events.append({"choices": [choice]})
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        events.append({"choices": [], "usage": counts})
        return [json.dumps(event).encode() for event in events] + [b"[DONE]"]


async def share_of(
    server: FakeServer, load: Load, process: int = 0, processes: int = 1, timeout: float = 60.0
) -> Share:
    job = Job(
        [Endpoint("127.0.0.1", server.port, "/v1/completions")], Dialect("m", token_ids=True), WORKLOAD, load, timeout
    )
    return await take_part(job, process, processes, lambda: None, asyncio.get_running_loop().time)


def run(server: FakeServer, load: Load, processes: int = 1, timeout: float = 60.0) -> list[Share]:
    """Run a load against a server, its client processes one after the other in this process."""

    async def everything() -> list[Share]:
        async with server, asyncio.timeout(GUARD_SECONDS):
            return [await share_of(server, load, process, processes, timeout) for process in range(processes)]

    return asyncio.run(everything())


@pytest.fixture
def served() -> Iterator[FakeServer]:
    """Run a server on a loop in a thread, for runs with processes of their own."""
    server, loop = FakeServer(), asyncio.new_event_loop()
    loop.run_until_complete(server.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server
    asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(GUARD_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def errors(shares: list[Share]) -> list[str | None]:
    return [record.error for share in shares for record in share.records]


def test_tokens_are_counted_exactly() -> None:
    server, load = FakeServer(), Load("closed", 5, requests=4)
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
        server = FakeServer()
        run(server, load, processes)
        return sorted(body["prompt"] for body in server.bodies)

    assert prompts(1) == prompts(3) == sorted(WORKLOAD.request(load.label, index).prompt for index in range(12))


def test_refused_requests_are_counted_and_keep_the_connection() -> None:
    server = FakeServer("good", "refuse", "good", "refuse", "refuse", "good")
    (share,) = run(server, Load("closed", 1, requests=6))
    assert errors([share]) == [None, "HTTP 503", None, "HTTP 503", "HTTP 503", None]
    assert share.records[1].detail == '{"error":{"message":"full"}}'
    assert server.connections == 1
    assert share.records[2].start - share.records[1].end >= ERROR_PAUSE * 0.9


def test_broken_replies_are_errors_and_do_not_affect_later_requests() -> None:
    server = FakeServer("cut", "error", "good")
    (share,) = run(server, Load("closed", 1, requests=3))
    assert errors([share]) == ["EOFError", "error event", None]


def test_connection_closed_while_idle_is_not_an_error() -> None:
    server = FakeServer("drop")
    (share,) = run(server, Load("closed", 1, requests=3))
    assert errors([share]) == [None] * 3 and len(server.bodies) == 3


def test_hanging_request_times_out() -> None:
    (share,) = run(FakeServer("hang", "good"), Load("closed", 1, requests=2), timeout=0.3)
    assert errors([share]) == ["timed out", None]


def test_unreachable_server_is_an_error() -> None:
    server = FakeServer()
    server.port = 1
    (share,) = asyncio.run(_gather_one(server, Load("closed", 1, requests=1)))
    assert share.records[0].error == "ConnectionRefusedError"


async def _gather_one(server: FakeServer, load: Load) -> list[Share]:
    return [await share_of(server, load)]


def test_duration_ends_a_closed_loop() -> None:
    (share,) = run(FakeServer(), Load("closed", 2, duration=0.2))
    assert len(share.records) > 2 and set(errors([share])) == {None}
    assert sorted(record.index for record in share.records)[:2] == [0, 1]


def test_command_line_run_saves_its_results(
    served: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_server_that_refuses_everything_ends_the_run(served: FakeServer) -> None:
    served.ways = ["refuse"]
    with pytest.raises(SystemExit, match="HTTP 503"):
        main(["--url", f"http://127.0.0.1:{served.port}", "--model", "m", "--streams", "1", "--clients", "1"])
