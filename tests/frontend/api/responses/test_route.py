"""`POST /v1/responses` over a real socket, in front of a scripted fake engine."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.protocol.codec import unpack_ids
from tandem.protocol.errors import ErrorCode
from tests.fakes.engine import FakeEngine
from tests.frontend.api.responses.test_response import anonymous, events_of, replay
from tests.frontend.conftest import RunningServer
from tests.frontend.conftest import post as send
from tests.support.broken_stream import LONG, post_broken_stream
from tests.support.reasoning_model import RAW, answer_with, with_reasoning, write_reasoning_model
from tests.support.shared_frontend import shared_fixtures

TEMPLATE = (
    "<|begin|>{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{{ tools | length if tools else '' }}assistant:"
)
QUESTION = "how do I join two paths?"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
SAID = '<think>hm</think>I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("model"), TEMPLATE)


shared, engine, server = shared_fixtures(with_reasoning)


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    return send(server.url + "/v1/responses", json={"model": "fake-model", "input": QUESTION, **fields})


def test_response_over_http_is_the_same_whole_and_streamed(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with(SAID)
    reply = post(server, tools=[LOOK], instructions="Be short.").json()
    thoughts, message, call = reply["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], call["arguments"], call["status"]) == ("look", '{"at": "köln"}', "completed")
    prompt = unpack_ids(engine.submits[0].prompt_ids)
    shown = f"<|begin|>system: Be short.\nuser: {QUESTION}\n1assistant:"
    assert RAW.decode(prompt, skip_special_tokens=False) == shown
    assert (reply["status"], reply["usage"]["input_tokens"]) == ("completed", len(prompt))
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
        answer_with("<think>hm</think>")(engine.submits[0])
    )
    engine.tokens_per_step = 3
    events = events_of(post(server, tools=[LOOK], instructions="Be short.", stream=True).content)
    last = events[-1]["response"]
    assert anonymous(last) == anonymous(reply)
    assert last["usage"] == reply["usage"]
    assert replay(events) == last["output"]


def test_output_items_are_accepted_as_input(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with(SAID)
    output = post(server, tools=[LOOK]).json()["output"]
    items = [{"role": "user", "content": QUESTION}, *output]
    items.append({"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "rain"})
    assert post(server, input=items, tools=[LOOK]).status_code == 200
    prompt = RAW.decode(unpack_ids(engine.submits[-1].prompt_ids), skip_special_tokens=False)
    assert "assistant: I look.[{" in prompt
    assert "tool: rain" in prompt


def test_errors_use_the_field_names_of_responses(server: RunningServer) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object", "not": {}}, "strict": True}
    for fields, status, param in (
        ({"model": "other"}, 404, "model"),
        ({"input": "x" * 9000}, 400, "input"),
        ({"max_output_tokens": 4000}, 400, "max_output_tokens"),
        ({"text": {"format": schema}}, 400, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, 400, "regex"),
        ({"reasoning": {"effort": "lots"}}, 400, "reasoning.effort"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ):
        response = post(server, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param)
        assert "response_format" not in error["message"]
        assert "messages" not in error["message"]
    assert send(server.url + "/v1/responses/resp_1/cancel", json={}).status_code == 404


def test_schema_keyword_that_cannot_be_enforced_is_named_in_the_header(
    server: RunningServer, engine: FakeEngine
) -> None:
    engine.tokens_per_step = 100
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    response = post(server, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert response.status_code == 200
    assert response.headers["x-tandem-ignored"] == "text.format.schema.properties.a.uniqueItems"


def test_effort_that_the_template_does_not_read_is_ignored(server: RunningServer) -> None:
    response = post(server, reasoning={"effort": "low"}, max_output_tokens=2)
    assert (response.status_code, response.headers["x-tandem-ignored"]) == (200, "reasoning.effort")


def test_text_format_schema_becomes_a_constraint(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with("{}")
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}
    assert post(server, text={"format": schema}).status_code == 200
    assert engine.submits[-1].constraint is not None
    assert post(server).status_code == 200
    assert engine.submits[-1].constraint is None


def test_engine_failure_is_reported_before_and_within_a_stream(server: RunningServer, engine: FakeEngine) -> None:
    engine.refusal = ErrorCode.OVERLOADED
    assert post(server, stream=True).status_code == 429
    engine.refusal = None
    engine.script = answer_with("one two three four five " * LONG)
    body = {"model": "fake-model", "input": QUESTION}
    *_, error, last = events_of(post_broken_stream(engine, server.url + "/v1/responses", body).content)
    assert (error["type"], error["code"]) == ("error", "model_failed")
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert post(server).status_code == 500


def test_openai_client_counts_the_tokens_of_a_prompt(server: RunningServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "fake-model", "instructions": "Be brief."}
        first = client.responses.create(**fields, input="Hello", max_output_tokens=4)
        counted = client.responses.input_tokens.count(**fields, input="Hello")
        assert first.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
        fields |= {"input": "And then?", "previous_response_id": first.id}
        second = client.responses.create(**fields, max_output_tokens=4)
        assert second.usage is not None
        assert client.responses.input_tokens.count(**fields).input_tokens == second.usage.input_tokens
        with pytest.raises(openai.NotFoundError, match="model"):
            client.responses.input_tokens.count(model="other", input="Hello")
        with pytest.raises(openai.NotFoundError):
            client.responses.compact(model="fake-model", input="Hello")


def test_openai_client_parses_responses(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = answer_with(SAID)
    create: dict[str, Any] = {"model": "fake-model", "input": QUESTION, "tools": [LOOK]}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        whole = client.responses.create(**create)
        assert whole.output_text == "I look."
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        with client.responses.stream(**create) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
        assert anonymous(final.to_dict(mode="json"))["output"][1]["content"][0]["text"] == "I look."
        assert final.usage is not None
        assert whole.usage is not None
        assert final.usage.total_tokens == whole.usage.total_tokens
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**create, previous_response_id="resp_1")
        assert caught.value.code == "previous_response_not_found"
