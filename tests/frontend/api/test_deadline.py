"""The time that a request may take, on every generating route."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, post, until
from tests.support.refusals import numbers_in
from tests.support.scrape import value
from tests.support.scripted_server import write_chat_model

MESSAGES = [{"role": "user", "content": "one"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one", "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "one"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2000},
}
LONG = {"/v1/completions": {"max_tokens": 2000}, "/v1/chat/completions": {"max_tokens": 2000}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def brief(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    """A server whose requests may take a moment."""
    engine.start()
    running = RunningServer(structs.replace(config, request_timeout=0.2)).start().ready()
    yield running
    running.stop()


@pytest.mark.parametrize("path", BODIES)
def test_a_request_without_an_answer_in_time_is_504(brief: RunningServer, engine: FakeEngine, path: str) -> None:
    engine.hold = True
    for stream in (False, True):
        answer = post(brief.url + path, json={"model": "fake-model", "stream": stream, **BODIES[path]})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (504, "timeout_error")
        assert 0.2 in numbers_in(error["message"]) and "--request-timeout" in error["message"]
        assert path == "/v1/messages" or error["code"] == "deadline_exceeded"
    until(lambda: engine.num_running == 0, "its rows are freed")
    # A busy machine may be too slow to give the engine each of them in time.
    metrics = get(brief.url + "/metrics").text
    assert value(metrics, 'tandem_frontend_aborts_total{reason="deadline"}') == len(engine.submits)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_takes_too_long_ends_with_an_event(brief: RunningServer, engine: FakeEngine, path: str) -> None:
    engine.step_seconds = 0.02
    body = {"model": "fake-model", "stream": True, **BODIES[path], **LONG.get(path, {})}
    answer = post(brief.url + path, json=body)
    assert answer.status_code in (200, 504)  # the latter on a machine too busy for a first token in time
    assert "0.2 s (--request-timeout)" in answer.text
    until(lambda: engine.num_running == 0, "its rows are freed")
