"""`--stream-interval-ms` on every streaming route: fewer events with the same content."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, post
from tests.support.scripted_server import say, write_chat_model

TOKENS = 60
TEXT = "one two three four five six seven eight nine ten " * 2
MESSAGES = [{"role": "user", "content": "one"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one", "max_tokens": TOKENS},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": TOKENS},
    "/v1/responses": {"input": "one", "max_output_tokens": TOKENS},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": TOKENS},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{path: (path, {}) for path in ROUTES},
    "stop": ("/v1/completions", {"stop": ["zebra"]}),
    "logprobs": ("/v1/chat/completions", {"logprobs": True}),
    "events": ("/v1/chat/completions", {"stream_format": "events"}),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def slow_writer(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    """Run a server that would write at most once an hour between the first token and the end."""
    engine.start()
    running = RunningServer(structs.replace(config, stream_interval=3600.0)).start().ready()
    yield running
    running.stop()


def streamed(server: RunningServer, path: str, fields: dict[str, Any]) -> list[str]:
    """Return the blocks of a stream."""
    body = {"model": "fake-model", "stream": True, "temperature": 0, **ROUTES[path], **fields}
    response = post(server.url + path, json=body)
    assert response.status_code == 200, response.text
    return response.text.strip().split("\n\n")


def text_of(block: str) -> str | None:
    """Return the text that an event adds to the answer; None if it adds none."""
    data = block.rpartition("data: ")[2]
    if data == "[DONE]":
        return None
    event = json.loads(data)
    choice = (event.get("choices") or [{}])[0]
    delta = event.get("delta", choice.get("delta", {}))
    found = delta if isinstance(delta, str) else delta.get("content") or delta.get("text")
    found = found or choice.get("text") or (event.get("text") if "token_id" in event else None)
    return found or None


def test_tokens_between_the_first_and_the_end_are_one_event(slow_writer: RunningServer, engine: FakeEngine) -> None:
    say(engine, TEXT)
    for name, (path, fields) in VARIANTS.items():
        texts = [text for block in streamed(slow_writer, path, fields) if (text := text_of(block)) is not None]
        assert "".join(texts) == TEXT, name
        assert (len(texts) > 20) if name == "events" else (len(texts) <= 3), (name, texts)
