"""Anthropic's client, over the Messages API."""

import json

import anthropic
from checks import ANSWER, FORECAST, MODEL, NEXT_QUESTION, QUESTION, base_url, expect, is_forecast, raises, run

client = anthropic.Anthropic(base_url=base_url(), api_key="none", timeout=120, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "forecast", "description": "The weather.", "input_schema": FORECAST}
GREEDY = {"temperature": 0}
NAMED = {"type": "tool", "name": "forecast"}


def ask(**fields: object) -> anthropic.types.Message:
    defaults = {"model": MODEL, "max_tokens": 256, "messages": MESSAGES, "extra_body": GREEDY}
    return client.messages.create(**{**defaults, **fields})


def size(reply: anthropic.types.Message) -> int:
    """Return the length of the prompt, with what was in the cache."""
    return reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)


def first_turn() -> None:
    reply = ask()
    expect(ANSWER in reply.content[0].text and reply.stop_reason == "end_turn", reply)
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    expect(counted.input_tokens == size(reply), counted)


def second_turn() -> None:
    first = ask()
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": NEXT_QUESTION}]
    second = ask(messages=turns, system=[{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}])
    expect(second.content[0].text and size(second) > size(first), second)


def tool() -> None:
    first = ask(tools=[TOOL], tool_choice=NAMED)
    (call,) = first.content
    expect(first.stop_reason == "tool_use" and is_forecast(call.input), first)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    expect(ask(tools=[TOOL], messages=turns).content, "an answer")


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=256, messages=MESSAGES, extra_body=GREEDY) as events:
        parts = list(events.text_stream)
        final = events.get_final_message()
    expect(len(parts) > 3 and ANSWER in "".join(parts), parts)
    expect(final.stop_reason == "end_turn" and final.usage.output_tokens > 0, final)


def json_schema() -> None:
    reply = ask(output_config={"format": {"type": "json_schema", "schema": FORECAST}})
    expect(is_forecast(json.loads(reply.content[0].text)), reply)


def errors() -> None:
    raises(anthropic.NotFoundError, lambda: ask(model="other"), 404)
    raises(anthropic.BadRequestError, lambda: ask(extra_body={"temperature": 9}), 400)


run(
    first_turn=(first_turn,), second_turn=(second_turn,), tool=(tool,), streaming=(stream,), structured=(json_schema,),
    more=(errors,),
)  # fmt: skip
