"""Limits that the flags of a server set, queued prompt tokens, and the room of the KV pool."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import ChatOptions, FrontendConfig
from tandem.frontend.engine.streams import ReadySet, TokenStream
from tandem.frontend.request.limits import RequestLimits
from tandem.protocol.codec import unpack_ids
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import DEADLINE, RunningServer, post, until
from tests.support.refusals import numbers_in
from tests.support.stream_client import request as http_request

LIMITS = RequestLimits(max_n=2, max_top_logprobs=3, max_stop_strings=1, max_prompt_tokens=20)


@pytest.fixture
def limited(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    engine.start()
    running = RunningServer(structs.replace(config, limits=LIMITS, max_queued_tokens=30))
    yield running.start().ready()
    running.stop()


def complete(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "fake-model", "prompt": [5] * 5, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=DEADLINE)


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({"n": 3}, 400, "n", r"\b3;.* 2 \(--max-n\)"),
        ({"logprobs": 4}, 400, "logprobs", r"\b4;.* 3 \(--max-top-logprobs\)"),
        ({"stop": ["a", "b"]}, 400, "stop", r"\b2;.* 1 \(--max-stop-strings\)"),
        ({"prompt": [5] * 21}, 400, "prompt", r"\b21 tokens;.* 20 \(--max-prompt-tokens\)"),
        ({"prompt": "x" * 4000}, 400, "prompt", r"\bat least \d+ tokens;.* 20 \(--max-prompt-tokens\)"),
    ],
)
def test_request_beyond_a_limit_is_rejected_with_the_flag(
    limited: RunningServer, fields: dict[str, Any], status: int, param: str, text: str
) -> None:
    response = complete(limited, **fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, param)
    assert re.search(text, error["message"])


def test_request_within_the_limits_is_accepted(limited: RunningServer) -> None:
    assert complete(limited, n=2, stop=["zzz"], prompt=[5] * 15).status_code == 200


def test_queued_prompt_tokens_are_bounded(limited: RunningServer, engine: FakeEngine) -> None:
    client = limited.server._service.client
    engine.hold = True
    with ThreadPoolExecutor(1) as pool:
        # More than the limit by itself, yet nothing else waits.
        waiting = pool.submit(complete, limited, prompt=[[5] * 20] * 2, n=2)
        until(lambda: client.queued_tokens == 40)
        refused = complete(limited)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        message = error_of(refused)["message"]
        assert numbers_in(message)[:3] == [40, 5, 30] and "(--max-queued-tokens)" in message
        engine.hold = False
        assert waiting.result().status_code == 200
    assert client.queued_tokens == 0
    assert complete(limited).status_code == 200


def test_sequence_of_a_client_that_leaves_is_not_queued(limited: RunningServer, engine: FakeEngine) -> None:
    client = limited.server._service.client
    engine.hold = True
    with socket.create_connection(limited.sock.getsockname()) as leaving:
        leaving.sendall(http_request(b'{"model": "fake-model", "prompt": [5, 5, 5, 5, 5]}'))
        until(lambda: client.queued_tokens == 5)
    until(lambda: client.queued_tokens == 0)


@pytest.mark.parametrize("how", ["failure", "engine loss"])
def test_sequence_that_ends_early_leaves_the_queue(limited: RunningServer, engine: FakeEngine, how: str) -> None:
    client = limited.server._service.client
    engine.hold = True
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, limited)
        until(lambda: client.queued_tokens == 5)
        if how == "failure":
            engine.break_after = 0
            engine.hold = False
        else:
            engine.die()
        until(lambda: client.queued_tokens == 0)
        if how == "engine loss":
            engine.hold = False
            engine.start()
            assert asked.result().status_code == 200
        else:
            assert asked.result().status_code >= 500


def test_a_prompt_is_queued_until_the_first_output_of_its_sequence() -> None:
    ready = ReadySet()
    streams = [TokenStream(1, 0, ready, 10), TokenStream(2, 0, ready, 5)]

    def queued() -> int:
        return sum(stream.queued_tokens for stream in streams)

    assert queued() == 15
    streams[0].put([7])
    streams[0].put([7])
    assert queued() == 5
    streams[1].put([7])
    assert queued() == 0


@pytest.fixture
def small_pool(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    """Run a server whose KV pool holds less than the model's context."""
    engine.kv_tokens = 512
    engine.start()
    running = RunningServer(config).start().ready()
    yield running
    running.stop()


def test_default_max_tokens_is_lowered_to_the_kv_pool(small_pool: RunningServer, engine: FakeEngine) -> None:
    """Check the limit; the KV of an output's last token is never computed."""
    complete(small_pool, prompt=[[5] * 496, [5] * 497, [5] * 498, [5] * 512])
    assert [submit.sampling.max_tokens for submit in engine.submits] == [16, 16, 15, 1]
    engine.submits.clear()
    assert complete(small_pool, prompt=[5] * 510, min_tokens=9).status_code == 200
    assert complete(small_pool, prompt=[5] * 510, max_tokens=20).status_code == 200
    assert [submit.sampling.max_tokens for submit in engine.submits] == [9, 20], "what was asked for the engine judges"


@pytest.mark.parametrize(("prompt", "numbers"), [([5] * 513, [513]), ("x" * 600, [600]), ("x" * 20_000, [])])
def test_prompt_longer_than_the_kv_pool_is_rejected(
    small_pool: RunningServer, engine: FakeEngine, prompt: str | list[int], numbers: list[int]
) -> None:
    response = complete(small_pool, prompt=prompt)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "kv_capacity_exceeded", "prompt")
    found = numbers_in(error["message"])
    assert "(--kv-tokens)" in error["message"]
    assert found[:-1] == numbers or (not numbers and found[0] > 512)
    assert found[-1] == 512
    assert engine.submits == []


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("route", "fields", "limit"),
    [
        ("chat/completions", CHAT, "max_completion_tokens"),
        ("chat/completions", CHAT, "max_tokens"),
        ("responses", {"input": "hi"}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("default", [None, 40, 10**6])
def test_chats_without_a_limit_may_fill_the_context_up_to_the_default(
    engine: FakeEngine, config: FrontendConfig, tmp_path: Path, route: str, fields: Any, limit: str, default: int | None
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    engine.kv_tokens = 99
    engine.start()
    chat = ChatOptions(default_max_tokens=default, template=template)
    running = RunningServer(structs.replace(config, chat=chat)).start().ready()
    try:
        for given in ({}, {limit: None}, {limit: 7}):
            body = {"model": "fake-model", **fields, **given}
            assert post(f"{running.url}/v1/{route}", json=body).status_code == 200
    finally:
        running.stop()
    room = 100 - len(unpack_ids(engine.submits[0].prompt_ids))
    expected = min(room, default or room)
    assert [submit.sampling.max_tokens for submit in engine.submits] == [expected, expected, 7]
