"""Grammars that reach the engine, and those that never do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tandem.frontend.config import ChatOptions, FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, post
from tests.support.byte_grammar import verdict

SPECIAL = {"<|begin|>": 0, "<|end|>": 1}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        "strict": True,
    },
}


@pytest.fixture
def thinking(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """Start a server with a model that begins its answers with reasoning."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}<think>")
    engine.start()
    options = ChatOptions(template=template, tool_parser="hermes", reasoning_parser="think")
    running = RunningServer(structs.replace(config, chat=options)).start().ready()
    yield running
    running.stop()


def complete(server: RunningServer, **fields: Any) -> httpx.Response:
    return post(server.url + "/v1/completions", json={"model": "fake-model", "prompt": "a", "max_tokens": 2, **fields})


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
    return post(server.url + "/v1/chat/completions", json=body)


def test_every_choice_gets_the_grammar_of_its_request(server: RunningServer, engine: FakeEngine) -> None:
    assert complete(server, regex="b+", n=2).status_code == 200
    first, second = engine.submits
    assert first.constraint is not None
    assert first.constraint == second.constraint
    assert verdict(first.constraint, "bb") == "whole"


def test_engine_learns_the_cpu_time_that_the_check_took_once(server: RunningServer, engine: FakeEngine) -> None:
    words = "|".join(f"{number:x}z.*" for number in range(4000))
    assert [complete(server, regex=words).status_code for _ in range(2)] == [200, 200]
    first, second = engine.submits
    assert first.constraint_seconds == second.constraint_seconds > 0


def test_free_text_has_no_grammar_and_starts_no_process(server: RunningServer, engine: FakeEngine) -> None:
    assert complete(server).status_code == 200
    assert complete(server, response_format={"type": "text"}).status_code == 200
    assert [(submit.constraint, submit.constraint_seconds) for submit in engine.submits] == [(None, 0.0)] * 2
    assert all(process.pid is None for process in server.server._service.grammars._processes)


def test_invalid_grammar_never_reaches_the_engine(server: RunningServer, engine: FakeEngine) -> None:
    for fields in ({"regex": "("}, {"grammar": "start: nowhere"}, {"grammar": "start: <[420000]>"}):
        response = complete(server, **fields)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_grammar")
    assert engine.submits == []


def test_grammar_may_name_special_tokens_of_the_model(server: RunningServer, engine: FakeEngine) -> None:
    assert complete(server, grammar='start: "a" <|end|>').status_code == 200
    (submit,) = engine.submits
    assert submit.constraint is not None
    assert verdict(submit.constraint, "a<|end|>", SPECIAL) == "whole"


def test_reasoning_precedes_constrained_output(thinking: RunningServer, engine: FakeEngine) -> None:
    assert chat(thinking, response_format={"type": "json_object"}).status_code == 200
    assert chat(thinking, tools=[TOOL], tool_choice="required").status_code == 200
    constrained, called = (submit.constraint for submit in engine.submits)
    assert constrained is not None
    assert called is not None
    assert verdict(constrained, "hm</think>\n{}") == "whole"
    assert verdict(constrained, "{}") == "beginning"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": null}}\n</tool_call>'
    assert verdict(called, "hm</think>\n\n" + call) == "whole"
    assert verdict(called, "hm</think>\n\nWell") == "wrong"
