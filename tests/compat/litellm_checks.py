"""litellm, against a server that speaks OpenAI's API."""

import json

import litellm
from checks import ANSWER, FORECAST, MODEL, QUESTION, TOOL, base_url, expect, is_forecast, raises, run

MESSAGES = [{"role": "user", "content": QUESTION}]
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


run(text, stream, tools, json_schema, text_completion, errors, timeouts)
