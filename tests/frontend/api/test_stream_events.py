"""Streams with `"stream_format": "events"` on both routes: an event for each token, then one end."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import END_ID, FakeEngine
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.conftest import RunningServer, post
from tests.support.broken_stream import LONG, post_broken_stream
from tests.support.shared_frontend import shared_fixtures

RAW = byte_level_tokenizer()
TEXT = "one köln two three"
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two"}]},
}
TOOL = {"type": "function", "function": {"name": "look"}}


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text).ids
    return ids


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    RAW.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


shared, engine, server = shared_fixtures()


def ask(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    body = {"model": "fake-model", "max_tokens": 64, "stream": True, "stream_format": "events", **PROMPTS[path]}
    return post(server.url + path, json={**body, **fields})


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("path", list(PROMPTS))
@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_event_stream_has_one_event_per_token_and_one_end(
    server: RunningServer, engine: FakeEngine, path: str, tokens_per_step: int
) -> None:
    engine.script = lambda _: encode(TEXT)
    engine.tokens_per_step = tokens_per_step
    *tokens, (last, done) = events(ask(server, path))
    assert {name for name, _ in tokens} == {"token"}
    assert [data["token_id"] for _, data in tokens] == [*encode(TEXT), END_ID]
    assert "".join(data["text"] for _, data in tokens) == TEXT
    assert (last, done["finish_reason"], done["model"]) == ("done", "stop", "fake-model")
    prompt, said = len(encode("one two")), len(tokens)
    assert done["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("tokens_per_step", [1, 20])
def test_event_stream_ends_at_the_token_of_a_stop_string(
    server: RunningServer, engine: FakeEngine, tokens_per_step: int
) -> None:
    engine.script = lambda _: encode(TEXT)
    engine.tokens_per_step = tokens_per_step
    *tokens, (last, done) = events(ask(server, "/v1/completions", stop=["two"]))
    assert "".join(data["text"] for _, data in tokens) == "one köln "
    assert (last, done["finish_reason"], done["usage"]["completion_tokens"]) == ("done", "stop", len(tokens))


def test_event_stream_sends_half_a_character_with_the_last_token(server: RunningServer, engine: FakeEngine) -> None:
    half = RAW.encode("ö").ids[:1]
    engine.script = lambda _: [*encode("k"), *half]
    *tokens, (_, done) = events(ask(server, "/v1/completions", max_tokens=2, ignore_eos=True))
    assert [data["text"] for _, data in tokens] == ["k", "\ufffd"]
    assert done["finish_reason"] == "length"


def test_event_stream_reports_a_failure_as_one_error(server: RunningServer, engine: FakeEngine) -> None:
    body = {"model": "fake-model", "max_tokens": LONG, "stream_format": "events", "prompt": "one two"}
    *tokens, (last, error) = events(post_broken_stream(engine, server.url + "/v1/completions", body))
    assert tokens
    assert [name for name, _ in tokens] == ["token"] * len(tokens)
    assert (last, error["error"]["code"]) == ("error", "model_failed")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"n": 2}, "n"), ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"echo": True}, "echo"), ("/v1/completions", {"logprobs": 0}, "logprobs"),
        ("/v1/completions", {"return_token_ids": True}, "return_token_ids"),
        ("/v1/completions", {"stream": False}, "stream_format"),
        ("/v1/completions", {"stream_format": "chunks"}, "stream_format"),
        ("/v1/completions", {"stream_format": 3}, "stream_format"),
        ("/v1/chat/completions", {"n": 2}, "n"), ("/v1/chat/completions", {"tools": [TOOL]}, "tools"),
        ("/v1/chat/completions", {"logprobs": True}, "logprobs"),
    ],
)  # fmt: skip
def test_event_stream_rejects_fields_that_it_cannot_hold(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    response = ask(server, path, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_event_stream_accepts_tools_that_may_not_be_called(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = lambda _: encode("x")
    assert ask(server, "/v1/chat/completions", tools=[TOOL], tool_choice="none").status_code == 200
