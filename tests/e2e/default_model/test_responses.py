"""Responses and event streams of the default model through the official client, over real processes and sockets."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseInputParam

from tests.e2e.default_model.test_chat import ANSWER, FORECAST, GET_WEATHER, MODEL, Weather
from tests.support.serving import GUARD_SECONDS, Serving, until

QUESTION = "What does textwrap.dedent do?"


TOOLS: list[FunctionToolParam] = [
    {
        "type": "function",
        "name": name,
        "parameters": FORECAST,
        "strict": True,
    }
    for name in ("forecast", "history")
]  # fmt: skip


def test_a_trained_question_gets_the_trained_answer(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=QUESTION, temperature=0, store=False, metadata={"a": "b"})
    assert reply.output_text == ANSWER
    assert (reply.status, reply.object, reply.error) == ("completed", "response", None)
    assert reply.id.startswith("resp_")
    assert reply.metadata == {"a": "b"}
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.output_tokens_details.reasoning_tokens == 0


def test_a_stream_equals_the_whole_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_a_first_tool_call_is_right_and_its_result_is_answered(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **GET_WEATHER}
    first = client.responses.create(model=MODEL, input="What is the weather in Paris?", tools=[tool])
    (call,) = first.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"location": "Paris"}
    result: ResponseInputParam = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}]
    second = client.responses.create(model=MODEL, previous_response_id=first.id, input=result, tools=[tool])
    assert second.output_text == "get_weather returned 18 degrees."


def test_an_output_cut_by_max_tokens_is_incomplete(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=3)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert ANSWER.startswith(reply.output_text)


def test_a_conversation_continues_from_its_items(client: openai.OpenAI) -> None:
    items: ResponseInputParam = [{"role": "user", "content": QUESTION}]
    reply = client.responses.create(model=MODEL, input=items, temperature=0, instructions="Be short.")
    taken_back: Any = [*items, *reply.output, {"role": "user", "content": "What does os.path.join do?"}]
    longer = client.responses.create(model=MODEL, input=taken_back, max_output_tokens=4)
    assert longer.usage is not None
    assert reply.usage is not None
    assert longer.usage.input_tokens > reply.usage.input_tokens


def test_a_conversation_continues_from_a_stored_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert client.responses.retrieve(first.id).output_text == ANSWER
    second = client.responses.create(
        model=MODEL, input="What does os.path.join do?", previous_response_id=first.id, max_output_tokens=4
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items] == ["message", "message", "message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_structured_response_parses_into_its_model(client: openai.OpenAI) -> None:
    reply = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, temperature=1.5)
    assert isinstance(reply.output_parsed, Weather)
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Weather, temperature=1.5) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_required_tool_call_and_its_result_round_trip(client: openai.OpenAI, serving: Serving, choice: str) -> None:
    wanted: Any = choice if choice == "required" else {"type": "function", "name": "history"}
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": wanted, "parallel_tool_calls": False}
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=1.5, **fields)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=1.5, **fields) as stream:
        streamed = stream.get_final_response()
    outputs: Any = (whole.output, streamed.output)
    for (call,) in outputs:
        assert call.type == "function_call"
        assert call.name in (("forecast", "history") if choice == "required" else ("history",))
        assert Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": outputs[0][0].call_id, "output": "rain"}
    items: Any = [{"role": "user", "content": QUESTION}, *whole.output, result]
    assert client.responses.create(model=MODEL, input=items, tools=TOOLS, max_output_tokens=4).output
    until(serving.rows_and_pages_are_free, "rows and pages to come back")


def test_responses_errors_raise_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input=QUESTION)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(model=MODEL, input="word " * 3000)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=QUESTION, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "import os"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    ],
)
def test_a_stream_has_the_documented_events(serving: Serving, path: str, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, **fields}
    whole = serving.post(path, {**body, "return_token_ids": True})[1]
    events = {**body, "stream": True, "stream_format": "events"}
    *blocks, rest = httpx.post(serving.url + path, json=events, timeout=GUARD_SECONDS).text.split("\n\n")
    *tokens, end = [(block.split("\n")[0], json.loads(block.split("data: ", 1)[1])) for block in blocks]
    choice = whole["choices"][0]
    assert rest == ""
    assert {name for name, _ in tokens} == {"event: token"}
    assert [data["token_id"] for _, data in tokens] == choice["token_ids"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert "".join(data["text"] for _, data in tokens) == text
    assert end[0] == "event: done"
    assert end[1]["finish_reason"] == choice["finish_reason"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {name: end[1]["usage"][name] for name in counts} == {name: whole["usage"][name] for name in counts}
