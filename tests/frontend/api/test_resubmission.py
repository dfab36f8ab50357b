"""Every generating route answers after the loss of an engine as if there had been none."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs

from tandem.frontend import config as config_module
from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, open_stream, post, until
from tests.support.scripted_server import write_chat_model

COMPLETION: dict[str, Any] = {"prompt": "one two", "max_tokens": 5, "seed": 7}
MESSAGES = [{"role": "user", "content": "one two"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5, "seed": 7}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
REQUESTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "completion": ("/v1/completions", 1, COMPLETION),
    "choices": ("/v1/completions", 3, {**COMPLETION, "n": 3}),
    "prompts": ("/v1/completions", 4, {**COMPLETION, "prompt": ["one", "two"], "n": 2}),
    "best_of": ("/v1/completions", 3, {**COMPLETION, "best_of": 3}),
    "echoed log-probabilities": ("/v1/completions", 1, {**COMPLETION, "echo": True, "logprobs": 2}),
    "scored prompt": ("/v1/completions", 1, {**COMPLETION, "echo": True, "logprobs": 2, "max_tokens": 0}),
    "stop string": ("/v1/completions", 1, {**COMPLETION, "stop": ["two"], "max_tokens": 50}),
    "session": ("/v1/completions", 1, {**COMPLETION, "session_id": "s"}),
    "regex": ("/v1/completions", 1, {**COMPLETION, "regex": "[a-z ]*"}),
    "chat": ("/v1/chat/completions", 1, CHAT),
    "chat log-probabilities": ("/v1/chat/completions", 2, {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "schema": ("/v1/chat/completions", 1, {**CHAT, "response_format": SCHEMA}),
    "response": ("/v1/responses", 1, {"input": "one two", "max_output_tokens": 20}),
    "message": ("/v1/messages", 1, {"messages": MESSAGES, "max_tokens": 5}),
}
STREAMED = {
    "events": ("/v1/completions", 1, {**COMPLETION, "stream_format": "events"}),
    **{name: REQUESTS[name] for name in ("choices", "chat log-probabilities", "response", "message")},
}
VARYING = re.compile(r'"(id|item_id|response_id|created|created_at|completed_at)": ?("[^"]*"|\d+)|: keep-alive\n\n')
"""What differs between two answers to one request."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


def lose_engine(engine: FakeEngine, count: int) -> None:
    """Replace the engine once it has this many sequences."""
    until(lambda: engine.num_running == count, "the sequences are in the engine")
    engine.die()
    engine.hold = False
    engine.start()


def blocks(answer: httpx.Response) -> list[str]:
    """Return the events of a stream, or a whole answer; the choices of a stream may come in any order."""
    return sorted(VARYING.sub("", answer.text).split("\n\n"))


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return post(server.url + path, json={"model": "fake-model", **body})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_the_same_after_the_loss_of_the_engine(
    server: RunningServer, engine: FakeEngine, stream: bool
) -> None:
    requests = STREAMED if stream else REQUESTS
    engine.tokens_per_step = 100  # so that a choice is one chunk
    with ThreadPoolExecutor(1) as pool:
        for name, (path, count, fields) in requests.items():
            body = {**fields, "stream": stream}
            server.ready()
            undisturbed = ask(server, path, body)
            seen = len(engine.submits)
            engine.hold = True
            asked = pool.submit(ask, server, path, body)
            lose_engine(engine, count)
            answer = asked.result()
            assert (answer.status_code, undisturbed.status_code) == (200, 200), (name, answer.text)
            assert blocks(answer) == blocks(undisturbed), name
            first, second = engine.submits[seen : seen + count], engine.submits[seen + count :]
            assert [one.prompt_ids for one in first] == [one.prompt_ids for one in second], name
            assert [one.sampling for one in first] == [one.sampling for one in second], name
            assert {one.http_request_id for one in (*first, *second)} == {answer.headers["x-request-id"]}
    metrics = get(server.url + "/metrics").text
    assert f"tandem_frontend_resubmitted_requests_total {len(requests)}.0" in metrics
    assert f"tandem_frontend_engine_losses_total {len(requests)}.0" in metrics
    assert "tandem_frontend_num_requests_running 0.0" in metrics


@pytest.fixture
def hasty(engine: FakeEngine, config: FrontendConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """Run a server whose streams begin at once, and whose requests are held for a moment only."""
    monkeypatch.setattr(config_module, "FIRST_STREAM_WAIT", 0.02)
    engine.start()
    running = RunningServer(structs.replace(config, sse_keepalive=0.02, hold_timeout=0.5)).start().ready()
    yield running
    running.stop()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_stream_whose_headers_are_sent_gets_an_event_when_no_engine_comes_back(
    hasty: RunningServer, engine: FakeEngine, path: str
) -> None:
    fields = next(fields for at, _, fields in REQUESTS.values() if at == path)
    engine.hold = True
    with open_stream("POST", hasty.url + path, json={"model": "fake-model", **fields, "stream": True}) as response:
        assert response.status_code == 200
        text = ""
        for part in response.iter_text():
            if not text:
                engine.die()
            text += part
    assert " 0.5 s (--hold-timeout)" in text
    assert "tandem_frontend_broken_streams_total" in get(hasty.url + "/metrics").text


def test_a_whole_answer_is_503_when_no_engine_comes_back(hasty: RunningServer, engine: FakeEngine) -> None:
    engine.hold = True
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, hasty, "/v1/completions", COMPLETION)
        until(lambda: engine.num_running == 1)
        engine.die()
        answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold = True
    client = server.server._service.client
    data = msgspec.json.encode({"model": "fake-model", **COMPLETION})
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(server.sock.getsockname()) as leaving:
        leaving.sendall((head % len(data)).encode() + data)
        until(lambda: engine.num_running == 1)
        engine.die()
        until(lambda: client.num_held == 1)
    until(lambda: client.num_held == 0)
    seen = len(engine.submits)
    engine.start()
    server.ready()
    assert len(engine.submits) == seen
