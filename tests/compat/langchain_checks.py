"""langchain-openai."""

from typing import Literal

import openai
from checks import ANSWER, MODEL, NEXT_QUESTION, QUESTION, base_url, expect, raises, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

SERVER = {"base_url": base_url() + "/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**SERVER, timeout=120)
responses = ChatOpenAI(**SERVER, timeout=120, use_responses_api=True, max_tokens=256)


class Forecast(BaseModel):
    """The weather."""

    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


class Cities(BaseModel):
    """Some cities."""

    names: set[Literal["Köln", "Bonn"]] = Field(min_length=1)


@tool
def forecast(unit: Literal["celsius", "kelvin"], days: Literal[1, 2]) -> str:
    """The weather."""
    return f"{unit} {days}"


def text() -> None:
    reply = chat.invoke(QUESTION)
    expect(ANSWER in reply.content, reply)
    expect(reply.usage_metadata["total_tokens"] > 0, reply)


def text_of_responses() -> None:
    expect(ANSWER in responses.invoke(QUESTION).text, "the answer")


def second_turn() -> None:
    for model in (chat.bind(max_tokens=256), responses):
        turns = [HumanMessage(QUESTION), model.invoke(QUESTION), HumanMessage(NEXT_QUESTION)]
        expect(model.invoke(turns).content, "an answer")


def previous_response_id() -> None:
    model = ChatOpenAI(**SERVER, timeout=120, use_previous_response_id=True, max_tokens=256)
    turns = [HumanMessage(QUESTION), model.invoke(QUESTION), HumanMessage(NEXT_QUESTION)]
    expect(model.invoke(turns).content, "an answer")


def stream_of_responses() -> None:
    expect(ANSWER in "".join(chunk.text for chunk in responses.stream(QUESTION)), "the answer")


def stream() -> None:
    chunks = list(ChatOpenAI(**SERVER, stream_usage=True).stream(QUESTION))
    expect(ANSWER in "".join(chunk.content for chunk in chunks), chunks)
    expect(any(chunk.usage_metadata for chunk in chunks), "usage")


def completion() -> None:
    expect(ANSWER in OpenAI(**SERVER, max_tokens=64).invoke(QUESTION), "the answer")


def tools() -> None:
    reply = chat.bind_tools([forecast], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    expect(forecast.invoke(reply.tool_calls[0]["args"]), reply)


def tool_result() -> None:
    for model in (chat.bind(max_tokens=256), responses):
        first = model.bind(
            tools=[convert_to_openai_tool(forecast)], tool_choice={"type": "function", "function": {"name": "forecast"}}
        ).invoke(QUESTION)
        results = [forecast.invoke(call) for call in first.tool_calls]
        expect(results and model.invoke([HumanMessage(QUESTION), first, *results]).content, first)


def structured_set() -> None:
    reply = chat.with_structured_output(Cities, method="function_calling").invoke(QUESTION, max_tokens=512)
    expect(reply is None or reply.names, reply)


def settings_of_other_models() -> None:
    for more in ({"verbosity": "low"}, {"service_tier": "flex"}, {"store": True}, {"reasoning_effort": "low"}):
        expect(ChatOpenAI(**SERVER, **more, max_tokens=16).invoke(QUESTION).content, more)


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


run(
    first_turn=(text, text_of_responses, completion),
    second_turn=(second_turn, previous_response_id),
    tool=(tools, tool_result),
    streaming=(stream, stream_of_responses, structured_stream),
    structured=(structured_by_schema, structured_by_tool, structured_set),
    more=(settings_of_other_models, errors, timeouts),
)
