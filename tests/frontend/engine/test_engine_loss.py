"""Loss and return of the engine: open streams end, and readiness follows."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.protocol.events import Phase
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_chat_template, write_tokenizer
from tests.frontend.conftest import DEADLINE, RunningServer, get, open_stream, post, until


class OpenStream:
    """A stream that is read in a thread until it ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.begun = threading.Event()
        self.text = ""
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        body = {"model": "fake-model", "prompt": "one two three", "max_tokens": 2000, "stream": True}
        with open_stream("POST", self.url + "/v1/completions", json=body) as response:
            for part in response.iter_text():
                self.text += part
                self.begun.set()

    def last_error(self) -> dict[str, Any]:
        """Wait for the end; return the error of the last event before [DONE]."""
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "the stream did not end"
        *_, last, done, rest = self.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
        return error


@pytest.fixture
def stream(server: RunningServer, engine: FakeEngine) -> Iterator[OpenStream]:
    """A stream in progress, slow enough not to end during the test."""
    engine.step_seconds = 0.02
    opened = OpenStream(server.url)
    assert opened.begun.wait(DEADLINE)
    yield opened
    opened.thread.join(DEADLINE)


def ready(server: RunningServer) -> dict[str, Any]:
    body: dict[str, Any] = get(server.url + "/health/ready").json()
    return body


def complete(server: RunningServer) -> httpx.Response:
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 2}
    return post(server.url + "/v1/completions", json=body)


def test_a_dead_engine_ends_streams_and_a_new_one_is_found(
    server: RunningServer, engine: FakeEngine, stream: OpenStream
) -> None:
    engine.die()
    assert stream.last_error()["code"] == "engine_unavailable"
    assert ready(server)["status"] in ("lost", "silent")
    assert complete(server).status_code == 503
    engine.start()
    server.ready()
    assert complete(server).status_code == 200
    assert len(engine.hellos) == 2
    assert "tandem_frontend_engine_connects_total 2.0" in get(server.url + "/metrics").text


def test_a_silent_engine_ends_streams_and_is_reconnected_later(engine: FakeEngine, config: FrontendConfig) -> None:
    engine.start()
    engine.step_seconds = 0.02
    server = RunningServer(structs.replace(config, beat_timeout=3.0)).start().ready()
    try:
        stream = OpenStream(server.url)
        assert stream.begun.wait(DEADLINE)
        engine.frozen = True
        assert "no heartbeat" in stream.last_error()["message"]
        assert ready(server)["status"] == "silent"
        # A frontend that was held up itself takes nobody for silent, and still has no engine.
        server.server._service.client._watch.reset_timers()
        held_up = ready(server)
        assert held_up["status"] == "lost"
        engine.frozen = False
        server.ready()
        assert complete(server).status_code == 200
    finally:
        engine.frozen = False
        server.stop()


def test_a_failed_engine_ends_streams_with_its_reason(
    server: RunningServer, engine: FakeEngine, stream: OpenStream
) -> None:
    engine.detail = "device lost"
    engine.phase = Phase.FAILED
    error = stream.last_error()
    assert error["code"] == "engine_failed"
    assert "device lost" in error["message"]
    assert ready(server)["status"] == "failed" and ready(server)["reason"].endswith(": device lost")


def test_a_draining_engine_keeps_streams_and_refuses_new_requests(
    server: RunningServer, engine: FakeEngine, stream: OpenStream
) -> None:
    engine.phase = Phase.DRAINING
    until(lambda: ready(server)["status"] == "draining")
    response = complete(server)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert stream.thread.is_alive()
    engine.die()
    stream.last_error()


def test_a_hung_engine_is_not_ready(engine: FakeEngine, config: FrontendConfig) -> None:
    engine.start()
    server = RunningServer(structs.replace(config, step_timeout=0.3)).start().ready()
    try:
        engine.hold = True
        stream = OpenStream(server.url)
        until(lambda: ready(server)["status"] == "hung", "no step is noticed")
        assert "1 requests wait" in ready(server)["reason"]
        assert complete(server).status_code == 503
        engine.hold = False
        engine.tokens_per_step = 2000
        server.ready()
        stream.thread.join(DEADLINE)
        assert '"finish_reason":"length"' in stream.text
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["refused", "protocol", "tokenizer", "template"])
def test_an_incompatible_engine_is_tried_once(
    engine: FakeEngine, config: FrontendConfig, tmp_path: Path, how: str
) -> None:
    if how == "refused":
        engine.hello_refusal = "protocol 9 wanted"
    elif how == "protocol":
        engine.protocol_version = 9
    elif how == "tokenizer":
        engine.facts = structs.replace(engine.facts, tokenizer_fingerprint="0" * 64)
    else:
        write_tokenizer(tmp_path)
        write_chat_template(tmp_path)
        config = structs.replace(config, model_dir=tmp_path)
        engine.facts = structs.replace(engine.facts, template_fingerprint="0" * 64)
    engine.start()
    server = RunningServer(config).start()
    try:
        until(lambda: ready(server)["status"] == "refused", "the mismatch is told")
        reason = ready(server)["reason"]
        told = {"refused": "protocol 9 wanted", "protocol": "protocol 9", "tokenizer": "tokenizer.json"}
        assert told.get(how, "--chat-template FILE") in reason
        assert complete(server).status_code == 503
        count = len(engine.hellos)
        engine.die()
        engine.hello_refusal = None
        engine.protocol_version = PROTOCOL_VERSION
        engine.facts = structs.replace(engine.facts, tokenizer_fingerprint="", template_fingerprint="")
        engine.start()
        server.ready()
        # One Hello a life of the engine: what does not fit is not tried again.
        assert (count, len(engine.hellos)) == (1, 2)
    finally:
        server.stop()


def test_draining_ends_open_streams_with_an_error_after_the_grace_period(
    server: RunningServer, engine: FakeEngine, stream: OpenStream
) -> None:
    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(server.server.drain_unasked)
    assert stream.last_error()["code"] == "shutting_down"
    until(lambda: engine.num_running == 0, "its row is freed")
    server.thread.join(DEADLINE)
    assert not server.thread.is_alive()
    until(lambda: engine.goodbyes == 1)


def test_requests_after_the_end_of_a_drain_are_503(server: RunningServer) -> None:
    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(server.server._service.end_requests)
    until(lambda: ready(server)["status"] == "draining")
    response = complete(server)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
