"""instructor, in the modes that an OpenAI-compatible server is asked in."""

from typing import Literal

import instructor
import openai
from checks import MODEL, NEXT_QUESTION, QUESTION, base_url, expect, raises, run
from pydantic import BaseModel, model_validator

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


def second_turn() -> None:
    client = instructor.from_openai(raw)
    first = ask(instructor.Mode.TOOLS)
    turns = [
        *MESSAGES, {"role": "assistant", "content": first.model_dump_json()}, {"role": "user", "content": NEXT_QUESTION}
    ]  # fmt: skip
    reply = client.chat.completions.create(model=MODEL, messages=turns, response_model=Forecast, max_retries=0)
    expect(isinstance(reply, Forecast), reply)


def retry_after_a_wrong_answer() -> None:
    """The client sends the call back with the validator's error as its result."""
    seen: list[Forecast] = []

    class Second(Forecast):
        @model_validator(mode="after")
        def is_the_second(self) -> "Second":
            seen.append(self)
            if len(seen) == 1:
                raise ValueError("ask again")
            return self

    reply = instructor.from_openai(raw).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Second, max_retries=2
    )
    expect(isinstance(reply, Second) and len(seen) == 2, seen)


def with_usage() -> None:
    client = instructor.from_openai(raw)
    _, reply = client.chat.completions.create_with_completion(
        model=MODEL, messages=MESSAGES, response_model=Forecast, max_retries=0
    )
    expect(reply.usage.total_tokens > 0, reply)


def errors() -> None:
    raises(Exception, lambda: ask(instructor.Mode.TOOLS, temperature=9))


run(
    first_turn=(with_usage,),
    second_turn=(second_turn,),
    tool=(tools, tools_strict, retry_after_a_wrong_answer),
    streaming=(partial_stream, list_stream),
    structured=(json_schema,),
    more=(errors,),
)
