"""Streams that wait: begun without output, and kept alive until there is some."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend import config as config_module
from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, open_stream, post, until
from tests.support.scripted_server import write_chat_model

MESSAGES = [{"role": "user", "content": "one"}]
COMMENT, PING = ": keep-alive", 'event: ping\ndata: {"type":"ping"}'
STREAMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/completions": ({"prompt": "one", "max_tokens": 3}, COMMENT, "data: [DONE]"),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 3}, COMMENT, "data: [DONE]"),
    "/v1/responses": ({"input": "one", "max_output_tokens": 3}, COMMENT, "event: response.incomplete"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 3}, PING, "event: message_stop"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hasty(engine: FakeEngine, config: FrontendConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """Run a server whose streams wait only for a moment."""
    monkeypatch.setattr(config_module, "FIRST_STREAM_WAIT", 0.02)
    engine.start()
    running = RunningServer(structs.replace(config, sse_keepalive=0.02)).start().ready()
    yield running
    running.stop()


def body_of(path: str) -> dict[str, Any]:
    return {"model": "fake-model", "stream": True, **STREAMS[path][0]}


def blocks(parts: Iterator[str]) -> Iterator[str]:
    """Yield the blocks of a stream as they arrive."""
    rest = ""
    for part in parts:
        *whole, rest = (rest + part).split("\n\n")
        yield from whole
    assert rest == ""


def test_a_waiting_stream_begins_and_is_kept_alive(hasty: RunningServer, engine: FakeEngine) -> None:
    for path, (_, sign, end) in STREAMS.items():
        engine.hold = True
        with open_stream("POST", hasty.url + path, json=body_of(path)) as response:
            assert response.status_code == 200
            seen: list[str] = []
            for block in blocks(response.iter_text()):
                seen.append(block)
                if seen.count(sign) == 3:
                    engine.hold = False
        assert seen.count(sign) >= 3
        assert seen[-1].startswith(end)
        opening = seen[: seen.index(sign)]
        assert all(block.startswith(("data: ", "event: ")) for block in opening)


def test_a_failure_of_a_begun_stream_is_an_event(hasty: RunningServer, engine: FakeEngine) -> None:
    for path, (_, sign, _) in STREAMS.items():
        engine.hold, engine.break_after = True, 1
        with open_stream("POST", hasty.url + path, json=body_of(path)) as response:
            assert response.status_code == 200
            text = ""
            for part in response.iter_text():
                text += part
                engine.hold = sign not in text
        assert "broken by the fake engine" in text


def test_streams_wait_in_silence_without_keep_alive(
    engine: FakeEngine, config: FrontendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "FIRST_STREAM_WAIT", 0.0)
    engine.start()
    engine.break_after = 1
    running = RunningServer(structs.replace(config, sse_keepalive=0.0)).start().ready()
    try:
        for path in STREAMS:
            assert post(running.url + path, json=body_of(path)).status_code == 500
        until(lambda: engine.num_running == 0)
    finally:
        running.stop()


def test_answers_that_are_not_streamed_wait_for_their_status(hasty: RunningServer, engine: FakeEngine) -> None:
    engine.break_after = 1
    for path in STREAMS:
        assert post(hasty.url + path, json={**body_of(path), "stream": False}).status_code == 500
