"""Retries of batch requests, and the responses that are recorded."""

import asyncio
import io
import json
import re
import sys

import httpx
import pytest
from msgspec import Raw

from tandem.frontend.cli.batch.files import BatchFailure, BatchRequest, BatchResponse
from tandem.frontend.cli.batch.progress import BatchProgress, Tally
from tandem.frontend.cli.batch.run_batch import LAST_PAUSE, BatchSender
from tandem.frontend.cli.connection import ServerError
from tests.fakes.http_server import Answer, ScriptedServer, scripted_server
from tests.support.refusals import numbers_in


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


REQUEST = BatchRequest("a", "POST", "/v1/completions", Raw(b'{"prompt":"x"}'))
BUSY = Answer(503, headers={"retry-after": "7"})


def send(url: str, retries: int, timeout: float = 20.0) -> tuple[BatchResponse | BatchFailure, list[float]]:
    """Send one request; return its outcome and the pauses before it."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def run() -> BatchResponse | BatchFailure:
        async with httpx.AsyncClient(timeout=timeout) as http:
            return await BatchSender(http, url, retries, BatchProgress(1, Tally()), sleep).send(REQUEST)

    return asyncio.run(run()), pauses


def status(outcome: BatchResponse | BatchFailure) -> int:
    assert isinstance(outcome, BatchResponse)
    return outcome.status_code


def test_response_is_recorded_with_its_request_id() -> None:
    with scripted_server(Answer(200, b'{"text": "y"}', {"x-request-id": "req-1"})) as server:
        outcome, pauses = send(server.url, 3)
    assert outcome == BatchResponse(200, "req-1", Raw(b'{"text": "y"}'))
    assert (server.requests, pauses) == ([("/v1/completions", b'{"prompt":"x"}')], [])


@pytest.mark.parametrize("code", [400, 403, 404, 413, 422])
def test_client_error_is_recorded_without_retry(code: int) -> None:
    with scripted_server(Answer(code)) as server:
        outcome, pauses = send(server.url, 3)
    assert (status(outcome), pauses) == (code, [])


@pytest.mark.parametrize(
    ("code", "error", "remedy"),
    [
        (401, "invalid_api_key", r"\(401, invalid_api_key\);.* --api-key .*TANDEM_API_KEY"),
        (403, "insufficient_permissions", r"\(403, insufficient_permissions\)"),
    ],
)
def test_refused_key_is_no_result(code: int, error: str, remedy: str) -> None:
    body = json.dumps({"error": {"message": "not with this key", "code": error}}).encode()
    with scripted_server(Answer(code, body)) as server, pytest.raises(ServerError, match=remedy):
        send(server.url, 3)
    assert len(server.requests) == 1


@pytest.mark.parametrize("code", [409, 429, 500, 502, 503, 504])
def test_busy_server_is_retried(code: int) -> None:
    with scripted_server(Answer(code), Answer(code), Answer(200)) as server:
        outcome, pauses = send(server.url, 3)
    assert (status(outcome), pauses) == (200, [0.5, 1.0])


def test_retry_after_is_respected_up_to_the_longest_pause() -> None:
    far, date = Answer(503, headers={"retry-after": "900"}), Answer(429, headers={"retry-after": "Fri, 1 Jan 2027"})
    with scripted_server(BUSY, far, date, Answer(200)) as server:
        outcome, pauses = send(server.url, 3)
    assert (status(outcome), pauses) == (200, [7.0, LAST_PAUSE, 2.0])


def test_last_busy_response_is_recorded() -> None:
    with scripted_server(BUSY) as server:
        outcome, pauses = send(server.url, 2)
    assert (status(outcome), pauses, len(server.requests)) == (503, [7.0, 7.0], 3)


def test_broken_connection_is_retried_and_then_raised() -> None:
    with scripted_server(Answer(0), Answer(200)) as server:
        assert status(send(server.url, 1)[0]) == 200
    with scripted_server(Answer(0)) as server, pytest.raises(ServerError, match="broke"):
        send(server.url, 1)
    with ScriptedServer([BUSY]) as gone:
        url = gone.url
    with pytest.raises(ServerError, match=re.escape(url)):
        send(url, 1)


def test_a_wait_is_reported_once_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(Answer(409), Answer(409), Answer(200)) as server:
        send(server.url, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert server.url in line and "409" in line
    with pytest.raises(ServerError):
        send(server.url, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert server.url in line and "`tandem serve`" in line and "--url" in line


def test_waits_for_the_same_are_reported_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [5.0]
    progress = BatchProgress(4, Tally(), lambda: clock[0])
    for clock[0] in (5.0, 6.0, 64.0, 65.0):
        progress.wait("busy")
        progress.proceed()
    assert capsys.readouterr().err == "tandem: busy\n" * 2


def test_a_wait_is_counted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = BatchProgress(4, Tally(), lambda: float(next(times)))
    progress.wait("waiting for the server at http://x")
    progress.wait("and for nothing else")
    progress.draw()
    progress.proceed()
    first, second, bar = filter(None, terminal.getvalue().split("\r"))
    assert "http://x" in first and [numbers_in(line) for line in (first, second)] == [[1], [2]]
    assert "0/4 requests" in bar


def test_response_that_is_not_json_is_a_failure() -> None:
    with scripted_server(Answer(200, b"<html>")) as server:
        outcome, _ = send(server.url, 1)
    assert isinstance(outcome, BatchFailure)
    assert outcome.code == "invalid_response" and "(200)" in outcome.message


def test_response_that_times_out_is_a_failure() -> None:
    with ScriptedServer([BUSY]) as silent:  # it listens but never answers
        outcome, _ = send(silent.url, 1, timeout=0.05)
    assert isinstance(outcome, BatchFailure)
    assert outcome.code == "request_timeout"
