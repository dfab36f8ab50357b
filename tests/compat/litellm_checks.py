"""litellm, against a server that speaks OpenAI's API."""

import asyncio
import json

import litellm
from checks import ANSWER, FORECAST, MODEL, NEXT_QUESTION, QUESTION, TOOL, base_url, expect, is_forecast, raises, run

MESSAGES = [{"role": "user", "content": QUESTION}]
NAMED = {"type": "function", "function": {"name": "forecast"}}
SERVER = {"model": f"openai/{MODEL}", "api_base": base_url() + "/v1", "api_key": "none", "num_retries": 0}


def text() -> None:
    reply = litellm.completion(**SERVER, messages=MESSAGES, temperature=0)
    expect(ANSWER in reply.choices[0].message.content, reply)
    expect(reply.usage.total_tokens > 0, reply)


def stream() -> None:
    chunks = list(
        litellm.completion(
            **SERVER, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    expect(ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks)
    expect(any(getattr(chunk, "usage", None) for chunk in chunks), "usage")


def tools() -> None:
    reply = litellm.completion(**SERVER, messages=MESSAGES, tools=[TOOL], tool_choice="required")
    call = reply.choices[0].message.tool_calls[0]
    expect(is_forecast(json.loads(call.function.arguments)), call)


def second_turn() -> None:
    """The client's own message goes back with all its fields, as agents built on it do."""
    first = litellm.completion(**SERVER, messages=MESSAGES, max_tokens=256).choices[0].message
    part = {"type": "text", "text": NEXT_QUESTION, "cache_control": {"type": "ephemeral"}}
    for resent in (first, first.model_dump()):
        turns = [*MESSAGES, resent, {"role": "user", "content": [part]}]
        expect(litellm.completion(**SERVER, messages=turns, max_tokens=64).choices[0].message.content, turns)


def tool_result() -> None:
    first = litellm.completion(**SERVER, messages=MESSAGES, tools=[TOOL], tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "name": "forecast", "content": "21"}
    turns = [*MESSAGES, first.model_dump(), result]
    expect(litellm.completion(**SERVER, messages=turns, tools=[TOOL], max_tokens=64).choices[0].message, turns)


def responses() -> None:
    reply = litellm.responses(**SERVER, input=QUESTION, temperature=0)
    second = litellm.responses(**SERVER, input=NEXT_QUESTION, previous_response_id=reply.id, max_output_tokens=64)
    expect(second.output, second)


def messages_of_anthropic() -> None:
    reply = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"anthropic/{MODEL}", api_base=base_url(), api_key="none", messages=MESSAGES, max_tokens=64
        )
    )
    expect(reply["content"][0]["text"], reply)


def settings_of_other_models() -> None:
    more = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
    expect(litellm.completion(**SERVER, messages=MESSAGES, max_tokens=16, **more).choices, more)


def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST, "strict": True}}
    reply = litellm.completion(**SERVER, messages=MESSAGES, response_format=form)
    expect(is_forecast(json.loads(reply.choices[0].message.content)), reply)


def text_completion() -> None:
    reply = litellm.text_completion(
        **{**SERVER, "model": f"text-completion-openai/{MODEL}"}, prompt=QUESTION, temperature=0, max_tokens=64
    )
    expect(ANSWER in reply.choices[0].text, reply)


def errors() -> None:
    raises(litellm.NotFoundError, lambda: litellm.completion(**{**SERVER, "model": "openai/other"}, messages=MESSAGES))
    raises(litellm.BadRequestError, lambda: litellm.completion(**SERVER, messages=MESSAGES, temperature=9))


def timeouts() -> None:
    raises(
        litellm.Timeout,
        lambda: litellm.completion(
            **SERVER, messages=MESSAGES, max_tokens=500, n=8, timeout=0.05, extra_body={"ignore_eos": True}
        ),
    )


run(
    first_turn=(text, text_completion),
    second_turn=(second_turn, responses),
    tool=(tools, tool_result),
    streaming=(stream,),
    structured=(json_schema,),
    more=(messages_of_anthropic, settings_of_other_models, errors, timeouts),
)
