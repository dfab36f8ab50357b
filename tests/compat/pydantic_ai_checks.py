"""pydantic-ai."""

import asyncio
from typing import Literal

from checks import ANSWER, FORECAST, MODEL, NEXT_QUESTION, QUESTION, base_url, expect, is_forecast, raises, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

provider = OpenAIProvider(base_url=base_url() + "/v1", api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
responses = OpenAIResponsesModel(MODEL, provider=provider)
TOOL = ToolDefinition(name="forecast", description="The weather.", parameters_json_schema=FORECAST)
GREEDY = {"temperature": 0.0}


class Forecast(BaseModel):
    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


def text() -> None:
    reply = Agent(model, model_settings=GREEDY).run_sync(QUESTION)
    expect(ANSWER in reply.output, reply)
    usage = reply.usage() if callable(reply.usage) else reply.usage
    expect(usage.output_tokens > 0, usage)


def text_of_responses() -> None:
    expect(ANSWER in Agent(responses, model_settings=GREEDY).run_sync(QUESTION).output, "the answer")


def second_turn() -> None:
    for asked in (model, responses):
        agent = Agent(asked, model_settings={**GREEDY, "max_tokens": 256})
        first = agent.run_sync(QUESTION)
        expect(agent.run_sync(NEXT_QUESTION, message_history=first.all_messages()).output, "an answer")


def tool_and_result() -> None:
    must = ModelRequestParameters(function_tools=[TOOL], allow_text_output=False)
    may = ModelRequestParameters(function_tools=[TOOL], allow_text_output=True)
    for asked in (model, responses):
        question = ModelRequest.user_text_prompt(QUESTION)
        first = model_request_sync(asked, [question], model_request_parameters=must)
        calls = [part for part in first.parts if part.part_kind == "tool-call"]
        expect(calls and is_forecast(calls[0].args_as_dict()), first)
        results = [ToolReturnPart(call.tool_name, "21", call.tool_call_id) for call in calls]
        turns = [question, first, ModelRequest(parts=results)]
        settings = {"max_tokens": 256}
        second = model_request_sync(asked, turns, model_request_parameters=may, model_settings=settings)
        expect(second.parts, second)


def stream_of_responses() -> None:
    stream(responses)


def stream(asked: OpenAIChatModel | OpenAIResponsesModel = model) -> None:
    async def ask() -> str:
        async with Agent(asked, model_settings=GREEDY).run_stream(QUESTION) as reply:
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


run(
    first_turn=(text, text_of_responses),
    second_turn=(second_turn,),
    tool=(tool_and_result, tools_beside_text),
    streaming=(stream, stream_of_responses, output_streamed),
    structured=(output_by_schema, output_by_tool),
    more=(errors,),
)
