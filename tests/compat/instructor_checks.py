"""instructor, in the modes that an OpenAI-compatible server is asked in."""

from typing import Literal

import instructor
import openai
from checks import MODEL, QUESTION, base_url, expect, raises, run
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": QUESTION}]
raw = openai.OpenAI(base_url=base_url() + "/v1", api_key="none", timeout=120, max_retries=0)


class Forecast(BaseModel):
    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


def ask(mode: instructor.Mode, **more: object) -> object:
    client = instructor.from_openai(raw, mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Forecast, max_retries=0, **more
    )


def tools() -> None:
    expect(isinstance(ask(instructor.Mode.TOOLS), Forecast), "parsed")


def tools_strict() -> None:
    expect(isinstance(ask(instructor.Mode.TOOLS_STRICT), Forecast), "parsed")


def json_schema() -> None:
    expect(isinstance(ask(instructor.Mode.JSON_SCHEMA), Forecast), "parsed")


def partial_stream() -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(model=MODEL, messages=MESSAGES, response_model=Forecast))
    expect(parts[-1].unit in ("celsius", "kelvin"), parts)


def list_stream() -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    items = client.chat.completions.create_iterable(model=MODEL, messages=MESSAGES, response_model=Forecast)
    # How many there are is up to the model; the default model finds no end.
    expect(isinstance(next(iter(items)), Forecast), "parsed")


def with_usage() -> None:
    client = instructor.from_openai(raw)
    _, reply = client.chat.completions.create_with_completion(
        model=MODEL, messages=MESSAGES, response_model=Forecast, max_retries=0
    )
    expect(reply.usage.total_tokens > 0, reply)


def errors() -> None:
    raises(Exception, lambda: ask(instructor.Mode.TOOLS, temperature=9))


run(tools, tools_strict, json_schema, partial_stream, list_stream, with_usage, errors)
