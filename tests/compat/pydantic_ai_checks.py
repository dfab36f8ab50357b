"""pydantic-ai."""

import asyncio
from typing import Literal

from checks import ANSWER, MODEL, QUESTION, base_url, expect, raises, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=base_url() + "/v1", api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
GREEDY = {"temperature": 0.0}


class Forecast(BaseModel):
    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


def text() -> None:
    reply = Agent(model, model_settings=GREEDY).run_sync(QUESTION)
    expect(ANSWER in reply.output, reply)
    usage = reply.usage() if callable(reply.usage) else reply.usage
    expect(usage.output_tokens > 0, usage)


def stream() -> None:
    async def ask() -> str:
        async with Agent(model, model_settings=GREEDY).run_stream(QUESTION) as reply:
            return "".join([part async for part in reply.stream_text(delta=True)])

    expect(ANSWER in asyncio.run(ask()), "the answer")


def output_by_tool() -> None:
    reply = Agent(model, output_type=ToolOutput(Forecast)).run_sync(QUESTION)
    expect(isinstance(reply.output, Forecast), reply)


def output_by_schema() -> None:
    reply = Agent(model, output_type=NativeOutput(Forecast)).run_sync(QUESTION)
    expect(isinstance(reply.output, Forecast), reply)


def output_streamed() -> None:
    async def ask() -> object:
        async with Agent(model, output_type=ToolOutput(Forecast)).run_stream(QUESTION) as reply:
            return await reply.get_output()

    expect(isinstance(asyncio.run(ask()), Forecast), "parsed")


def tools_beside_text() -> None:
    agent = Agent(model, model_settings=GREEDY)

    @agent.tool_plain
    def forecast(unit: Literal["celsius", "kelvin"]) -> str:
        """The weather."""
        return unit

    expect(agent.run_sync(QUESTION).output, "an answer")


def errors() -> None:
    other = OpenAIChatModel("other", provider=provider)
    raises(ModelHTTPError, lambda: Agent(other).run_sync(QUESTION), 404)
    raises(ModelHTTPError, lambda: Agent(model, model_settings={"temperature": 9.0}).run_sync(QUESTION), 400)


run(text, stream, output_by_tool, output_by_schema, output_streamed, tools_beside_text, errors)
