"""Request bodies of every size: where they are parsed, and how many bytes are buffered at once."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from tandem.frontend.api.byte_budget import MAX_INLINE_BODY, ByteBudget
from tandem.frontend.api.completions import route as completions
from tandem.frontend.api.completions.request import CompletionRequest, parse_completion
from tandem.frontend.api.request_body import read_body
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.frontend.conftest import RunningServer, get, post

CHUNK = b" " * 50_000


def request(*chunks: bytes) -> Request:
    """Build a request of these chunks; reading beyond the last one fails the test."""
    parts = list(chunks)

    async def receive() -> dict[str, Any]:
        assert parts, "read beyond the end"
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    return Request({"type": "http", "headers": []}, receive)


def read(budget: ByteBudget, *chunks: bytes, limit: int = 10**9) -> bytes:
    with budget.reservation() as reservation:
        return asyncio.run(read_body(request(*chunks), limit, reservation))


def test_body_budget_counts_large_bodies_while_they_are_held() -> None:
    budget = ByteBudget(200_000, "bodies")
    with budget.reservation() as reservation:
        assert asyncio.run(read_body(request(CHUNK, CHUNK), 10**9, reservation)) == CHUNK * 2
        assert budget.used == 100_000
        assert read(budget, CHUNK) == CHUNK, "small bodies pass"
        assert read(budget, CHUNK, CHUNK) == CHUNK * 2
        with pytest.raises(ApiError, match="200000") as caught:
            read(budget, CHUNK, CHUNK, CHUNK)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        assert budget.used == 100_000
    assert budget.used == 0


def test_oversized_body_is_drained_to_its_end() -> None:
    budget = ByteBudget(10**9, "bodies")
    for chunks in ((CHUNK,), (CHUNK, CHUNK, CHUNK)):
        with pytest.raises(ApiError) as caught:
            read(budget, *chunks, limit=10)
        assert caught.value.status == 413
    assert budget.used == 0


def test_large_bodies_are_parsed_outside_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the process answers other requests while it parses a large body."""
    entered, leave = threading.Event(), threading.Event()
    threads: list[str] = []

    def slow(body: bytes, ignored: IgnoredFields) -> CompletionRequest:
        threads.append(threading.current_thread().name)
        if len(body) > MAX_INLINE_BODY:
            entered.set()
            assert leave.wait(30)
        return parse_completion(body, ignored)

    monkeypatch.setattr(completions, "parse_completion", slow)
    body = {"model": "fake-model", "prompt": "one", "user": "x" * MAX_INLINE_BODY}
    answers: list[int] = []
    client = threading.Thread(
        target=lambda: answers.append(post(server.url + "/v1/completions", json=body).status_code)
    )
    client.start()
    try:
        assert entered.wait(30)
        assert get(server.url + "/health/live").status_code == 200
        assert post(server.url + "/v1/completions", json={**body, "user": "x"}).status_code == 200
    finally:
        leave.set()
        client.join()
    assert answers == [200]
    assert threads[0].startswith("parse")
    assert threads[1] == "server"


def test_many_token_ids_are_packed_outside_the_event_loop(server: RunningServer) -> None:
    service = server.server._service
    ran: list[str] = []
    run = service.parser.run

    async def spy(function: Any, *arguments: Any) -> Any:
        ran.append(function.__name__)
        return await run(function, *arguments)

    service.parser.run = spy  # type: ignore[method-assign]
    body = {"model": "fake-model", "prompt": [5] * 100, "max_tokens": 1}
    assert post(server.url + "/v1/completions", json=body).status_code == 200
    assert ran == []
    server.server._service.client._link.ready = msgspec.structs.replace(  # type: ignore[union-attr]
        service.ready(), model=msgspec.structs.replace(service.ready().model, max_len=10_000)
    )
    body["prompt"] = [5] * 5000
    assert post(server.url + "/v1/completions", json=body).status_code == 200
    assert ran == ["_pack"]
    body["prompt"] = [5] * 5000 + [420]
    assert post(server.url + "/v1/completions", json=body).status_code == 400
