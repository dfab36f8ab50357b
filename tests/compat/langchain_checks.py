"""langchain-openai."""

from typing import Literal

import openai
from checks import ANSWER, MODEL, QUESTION, base_url, expect, raises, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

SERVER = {"base_url": base_url() + "/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**SERVER, timeout=120)


class Forecast(BaseModel):
    """The weather."""

    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


@tool
def forecast(unit: Literal["celsius", "kelvin"], days: Literal[1, 2]) -> str:
    """The weather."""
    return f"{unit} {days}"


def text() -> None:
    reply = chat.invoke(QUESTION)
    expect(ANSWER in reply.content, reply)
    expect(reply.usage_metadata["total_tokens"] > 0, reply)


def stream() -> None:
    chunks = list(ChatOpenAI(**SERVER, stream_usage=True).stream(QUESTION))
    expect(ANSWER in "".join(chunk.content for chunk in chunks), chunks)
    expect(any(chunk.usage_metadata for chunk in chunks), "usage")


def completion() -> None:
    expect(ANSWER in OpenAI(**SERVER, max_tokens=64).invoke(QUESTION), "the answer")


def tools() -> None:
    reply = chat.bind_tools([forecast], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    expect(forecast.invoke(reply.tool_calls[0]["args"]), reply)


def structured_by_schema() -> None:
    expect(isinstance(chat.with_structured_output(Forecast, method="json_schema").invoke(QUESTION), Forecast), "parsed")


def structured_by_tool() -> None:
    reply = chat.with_structured_output(Forecast, method="function_calling").invoke(QUESTION)
    expect(isinstance(reply, Forecast), reply)


def structured_stream() -> None:
    parts = list(chat.with_structured_output(Forecast, method="json_schema").stream(QUESTION))
    expect(isinstance(parts[-1], Forecast), parts)


def errors() -> None:
    raises(openai.NotFoundError, lambda: ChatOpenAI(**{**SERVER, "model": "other"}).invoke(QUESTION), 404)
    raises(openai.BadRequestError, lambda: ChatOpenAI(**{**SERVER, "temperature": 9}).invoke(QUESTION), 400)


def timeouts() -> None:
    hasty = ChatOpenAI(**SERVER, timeout=0.05, n=8, max_tokens=500, extra_body={"ignore_eos": True})
    raises(openai.APITimeoutError, lambda: hasty.invoke(QUESTION))


run(text, stream, completion, tools, structured_by_schema, structured_by_tool, structured_stream, errors, timeouts)
