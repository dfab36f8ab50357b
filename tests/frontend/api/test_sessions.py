"""The fields `session_id`, `cache_salt` and `priority`, and the usage of the prefix cache."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from tandem.protocol.errors import ErrorCode
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_chat_template, write_tokenizer
from tests.frontend.api.test_errors import error_of
from tests.frontend.api.test_malformed import GENERATING, GOOD
from tests.frontend.conftest import RunningServer, open_stream, post, until
from tests.support.shared_frontend import shared_fixtures


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that can chat."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    write_chat_template(folder)
    return folder


shared, engine, server = shared_fixtures(lambda config: structs.replace(config, unknown_fields="refuse"))


@pytest.fixture
def mortal_engine(engine: FakeEngine, server: RunningServer) -> Iterator[FakeEngine]:
    """Yield the engine to a test that ends it; the next test has one again."""
    yield engine
    engine.die()
    engine.start()
    server.ready()


def delete(server: RunningServer, name: str) -> httpx.Response:
    return httpx.delete(f"{server.url}/v1/sessions/{name}", timeout=30)


def ask(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = post(server.url + path, json={**GOOD[path], **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", GENERATING)
def test_session_fields_reach_the_engine(server: RunningServer, engine: FakeEngine, path: str) -> None:
    ask(server, path, priority=-3, session_id="talk", cache_salt="pepper")
    submit = engine.submits[-1]
    assert (submit.priority, submit.session, submit.cache_salt) == (-3, "talk", "pepper")
    ask(server, path)
    submit = engine.submits[-1]
    assert (submit.priority, submit.session, submit.cache_salt) == (0, "", "")


def test_session_fields_reach_the_engine_when_only_scoring(server: RunningServer, engine: FakeEngine) -> None:
    fields = {"priority": 3, "session_id": "talk", "cache_salt": "pepper"}
    ask(server, "/v1/completions", echo=True, max_tokens=0, logprobs=1, **fields)
    submit = engine.submits[-1]
    assert (submit.priority, submit.session, submit.cache_salt) == (3, "talk", "pepper")
    assert submit.prompt_logprobs == 1


@pytest.mark.parametrize(
    ("path", "details"),
    [
        ("/v1/completions", "prompt_tokens_details"),
        ("/v1/chat/completions", "prompt_tokens_details"),
        ("/v1/responses", "input_tokens_details"),
    ],
)
def test_usage_reports_cached_tokens(server: RunningServer, engine: FakeEngine, path: str, details: str) -> None:
    engine.cached = lambda _: 48
    assert ask(server, path)["usage"][details]["cached_tokens"] == 48
    more = {} if path == "/v1/responses" else {"stream_options": {"include_usage": True}}
    last = events(post(server.url + path, json={**GOOD[path], "stream": True, **more}))[-1]
    usage = last["response"]["usage"] if path == "/v1/responses" else last["usage"]
    assert usage[details]["cached_tokens"] == 48


def test_event_stream_reports_cached_tokens(server: RunningServer, engine: FakeEngine) -> None:
    engine.cached = lambda _: 16
    body = {**GOOD["/v1/completions"], "stream": True, "stream_format": "events"}
    done = events(post(server.url + "/v1/completions", json=body))[-1]
    assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_cached_tokens_count_the_first_choice_of_each_prompt(server: RunningServer, engine: FakeEngine) -> None:
    engine.cached = lambda submit: 100 if submit.sampling.choice else len(submit.prompt_ids) // 4
    reply = ask(server, "/v1/completions", prompt=["one", "one two three"], n=3)
    usage = reply["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


def test_openai_client_reads_cached_tokens(server: RunningServer, engine: FakeEngine) -> None:
    engine.cached, engine.tokens_per_step = lambda _: 7, 100
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": "one"}])
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 7
        completion = client.completions.create(model="fake-model", prompt="one two")
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 7
        response = client.responses.create(model="fake-model", input="one two")
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
def test_busy_session_is_rejected_with_409(server: RunningServer, engine: FakeEngine, stream: bool) -> None:
    body = {**GOOD["/v1/completions"], "max_tokens": 1000, "session_id": "talk", "stream": True}
    with open_stream("POST", server.url + "/v1/completions", json=body) as turn:
        assert turn.status_code == 200
        engine.hold = True
        second = post(server.url + "/v1/completions", json={**body, "stream": stream})
        assert second.status_code == 409
        error = error_of(second)
        assert (error["type"], error["code"]) == ("invalid_request_error", "session_busy")
        assert (error["param"], second.headers["retry-after"]) == ("session_id", "1")
        other = post(server.url + "/tokenize", json=GOOD["/tokenize"])
        assert other.status_code == 200
    engine.hold = False
    until(lambda: engine.num_running == 0)
    ask(server, "/v1/completions", session_id="talk")


@pytest.mark.parametrize("path", GENERATING)
def test_session_id_is_rejected_by_an_engine_without_sessions(
    server: RunningServer, engine: FakeEngine, path: str
) -> None:
    engine.refusal = ErrorCode.SESSIONS_OFF
    response = post(server.url + path, json={**GOOD[path], "session_id": "talk"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "sessions_off", "session_id")
    assert "retry-after" not in response.headers


def test_session_is_rejected_when_nothing_is_computed(server: RunningServer, engine: FakeEngine) -> None:
    fields = {"echo": True, "max_tokens": 0, "session_id": "talk"}
    response = post(server.url + "/v1/completions", json={**GOOD["/v1/completions"], **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, "session_id")
    assert "'logprobs'" in error_of(response)["message"]
    assert engine.submits == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("DELETE", "/v1/sessions", 404, "unknown_url"),
        ("DELETE", "/v1/sessions/", 404, "session_not_found"),
        ("GET", "/v1/sessions", 404, "unknown_url"),
        ("GET", "/v1/sessions/", 405, "method_not_allowed"),
        ("GET", "/v1/sessions/talk", 405, "method_not_allowed"),
        ("POST", "/v1/completions/", 400, "invalid_request"),
    ],
)
def test_slash_at_the_end_of_a_path_gets_no_redirect(
    server: RunningServer, method: str, path: str, status: int, code: str
) -> None:
    response = httpx.request(method, server.url + path, timeout=30)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert "location" not in response.headers
    assert "session ''" not in error_of(response)["message"]


@pytest.mark.parametrize("name", ["a\nb", "\x00", "a\r", "\u2028"])
def test_session_id_with_a_control_character_is_rejected(server: RunningServer, engine: FakeEngine, name: str) -> None:
    fields = {**GOOD["/v1/completions"], "session_id": name}
    response = post(server.url + "/v1/completions", json=fields)
    assert (response.status_code, error_of(response)["param"]) == (400, "session_id")
    assert engine.submits == []


@pytest.mark.parametrize(("name", "quoted"), [("talk", "talk"), ("a/b c?é", "a%2Fb%20c%3F%C3%A9"), ("talk/", "talk/")])
def test_session_is_deleted_once(server: RunningServer, engine: FakeEngine, name: str, quoted: str) -> None:
    ask(server, "/v1/completions", session_id=name)
    first, second = delete(server, quoted), delete(server, quoted)
    assert (first.status_code, first.json()) == (200, {"id": name, "object": "session", "deleted": True})
    assert second.status_code == 404
    assert (error_of(second)["code"], error_of(second)["param"]) == ("session_not_found", "session_id")
    assert name in error_of(second)["message"]
    assert engine.sessions == set()


def test_session_deletion_is_503_without_an_engine(server: RunningServer, mortal_engine: FakeEngine) -> None:
    mortal_engine.die()
    until(lambda: delete(server, "talk").status_code == 503)
    error = error_of(delete(server, "talk"))
    assert (error["type"], error["code"]) == ("overloaded_error", "engine_unavailable")


def test_session_deletion_fails_when_the_engine_dies(server: RunningServer, mortal_engine: FakeEngine) -> None:
    """Check that the call ends with the link, well before its own timeout."""
    mortal_engine.mute = True
    calls = server.server._service.client.calls
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(delete, server, "talk")
        until(lambda: calls.num_open == 1)
        mortal_engine.die()
        response = asked.result()
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_unavailable"
    assert "answer" not in error_of(response)["message"]
    assert calls.num_open == 0
