"""The official client. `python openai_checks.py http://127.0.0.1:8000`, in its 1.x, 2.x or 3.x line."""

import json
from typing import Literal

import openai
from checks import ANSWER, FORECAST, MODEL, NEXT_QUESTION, QUESTION, TOOL, base_url, expect, is_forecast, raises, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=base_url() + "/v1", api_key="none", timeout=120, max_retries=0)
chat = client.chat.completions
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST, "strict": True}}


class Forecast(BaseModel):
    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


def models() -> None:
    expect([model.id for model in client.models.list()] == [MODEL], "models")
    expect(client.models.retrieve(MODEL).id == MODEL, "model")
    raises(openai.NotFoundError, lambda: client.models.retrieve("other"), 404)


def completion() -> None:
    reply = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=64, temperature=0, logprobs=2)
    expect(ANSWER in reply.choices[0].text, reply)
    expect(reply.choices[0].finish_reason == "stop", reply)
    expect(reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens, reply)
    expect(len(reply.choices[0].logprobs.tokens) == len(reply.choices[0].logprobs.top_logprobs), reply)


def completion_stream() -> None:
    stream = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=64, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    expect(ANSWER in "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks)
    expect(chunks[-1].usage.completion_tokens > 0, chunks[-1])


def chat_whole() -> None:
    reply = chat.create(model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2)
    expect(ANSWER in reply.choices[0].message.content, reply)
    expect(reply.choices[0].finish_reason == "stop", reply)
    expect(reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens, reply)
    expect(len(reply.choices[0].logprobs.content[0].top_logprobs) == 2, reply)


def chat_second_turn() -> None:
    first = chat.create(model=MODEL, messages=MESSAGES, max_tokens=256).choices[0].message
    turns = [*MESSAGES, first, {"role": "user", "content": NEXT_QUESTION}]
    expect(chat.create(model=MODEL, messages=turns, max_tokens=64).choices[0].message.content, "an answer")


def chat_several_choices() -> None:
    reply = chat.create(model=MODEL, messages=MESSAGES, n=3, seed=1, max_completion_tokens=8)
    expect([choice.index for choice in reply.choices] == [0, 1, 2], reply)
    expect(reply.usage.completion_tokens <= 24, reply.usage)


def chat_stream() -> None:
    chunks = list(chat.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    shown = [chunk.choices[0] for chunk in chunks if chunk.choices]
    expect(ANSWER in "".join(choice.delta.content or "" for choice in shown), chunks)
    expect(shown[0].delta.role == "assistant", shown[0])
    expect([choice.finish_reason for choice in shown if choice.finish_reason] == ["stop"], shown)
    expect(chunks[-1].usage.completion_tokens > 0, chunks[-1])


def stream_is_stopped_early() -> None:
    stream = chat.create(model=MODEL, messages=MESSAGES, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()


def tool_call() -> None:
    reply = chat.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    expect(call.function.name == "forecast" and is_forecast(json.loads(call.function.arguments)), call)
    expect(reply.choices[0].finish_reason == "tool_calls", reply)
    turn = [*MESSAGES, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    expect(chat.create(model=MODEL, messages=turn, tools=[TOOL], max_tokens=8).choices[0].message, "an answer")


def tool_call_stream() -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    stream = chat.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=named, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    expect([call.function.name for call in calls if call.function.name] == ["forecast"], calls)
    expect(is_forecast(json.loads("".join(call.function.arguments or "" for call in calls))), calls)


def tool_choice_auto() -> None:
    reply = chat.create(model=MODEL, messages=MESSAGES, tools=[TOOL], temperature=0)
    expect(reply.choices[0].finish_reason in ("stop", "tool_calls"), reply)


def json_object() -> None:
    reply = chat.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=512, temperature=0
    )
    if reply.choices[0].finish_reason == "stop":
        expect(isinstance(json.loads(reply.choices[0].message.content), dict), reply)


def json_schema() -> None:
    reply = chat.create(model=MODEL, messages=MESSAGES, response_format=SCHEMA, temperature=1.5)
    expect(is_forecast(json.loads(reply.choices[0].message.content)), reply)


def parsed_into_a_model() -> None:
    parse = getattr(chat, "parse", None) or client.beta.chat.completions.parse
    reply = parse(model=MODEL, messages=MESSAGES, response_format=Forecast)
    expect(isinstance(reply.choices[0].message.parsed, Forecast), reply)


def errors() -> None:
    raises(openai.NotFoundError, lambda: chat.create(model="other", messages=MESSAGES), 404)
    raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=[]), 400)
    raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=MESSAGES, temperature=9), 400)
    body = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"not": {}}}}
    }
    error = raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=MESSAGES, extra_body=body), 400)
    expect(error.code == "invalid_json_schema" and "'not'" in error.message, error)
    expect(error.param == "response_format.json_schema.schema" and error.request_id, error)


def timeouts() -> None:
    hasty = client.with_options(timeout=0.05)
    endless = {"ignore_eos": True}
    raises(
        openai.APITimeoutError,
        lambda: hasty.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=500, n=8, extra_body=endless),
    )
    expect(chat.create(model=MODEL, messages=MESSAGES, max_tokens=4), "the server answers on")


def request_ids() -> None:
    reply = chat.create(model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "from-me"})
    expect(reply._request_id == "from-me", reply._request_id)


def responses() -> None:
    reply = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    expect(ANSWER in reply.output_text, reply)


def responses_second_turn() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    second = client.responses.create(
        model=MODEL, input=NEXT_QUESTION, previous_response_id=first.id, max_output_tokens=64
    )
    expect(second.usage.input_tokens > first.usage.total_tokens - first.usage.input_tokens, second)
    expect(client.responses.retrieve(first.id).output_text == first.output_text, first)
    expect(len(list(client.responses.input_items.list(second.id))) == 3, second)
    client.responses.delete(second.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(second.id), 404)


def responses_tool_call() -> None:
    tool = {"type": "function", **TOOL["function"]}
    first = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice={"type": "function", "name": "forecast"}
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    expect(is_forecast(json.loads(call.arguments)), call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    second = client.responses.create(
        model=MODEL, input=[result], tools=[tool], previous_response_id=first.id, max_output_tokens=64
    )
    expect(second.output, second)


def responses_stream() -> None:
    events = list(client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(ANSWER in text and events[-1].type == "response.completed", events[-1])


run(
    first_turn=(chat_whole, responses, completion),
    second_turn=(chat_second_turn, responses_second_turn),
    tool=(tool_call, responses_tool_call, tool_choice_auto),
    streaming=(chat_stream, responses_stream, completion_stream, tool_call_stream, stream_is_stopped_early),
    structured=(json_schema, json_object, parsed_into_a_model),
    more=(models, chat_several_choices, errors, timeouts, request_ids),
)
