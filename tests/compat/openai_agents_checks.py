"""openai-agents, over the Responses API (its default) and over chat completions."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    WebSearchTool,
    function_tool,
)  # fmt: skip
from checks import ANSWER, MODEL, NEXT_QUESTION, QUESTION, base_url, expect, run
from openai import AsyncOpenAI
from pydantic import BaseModel

LOOP = asyncio.new_event_loop()
QUIET = RunConfig(tracing_disabled=True)
SHORT = ModelSettings(temperature=0, max_tokens=512)
CALLING = ModelSettings(temperature=0, max_tokens=512, tool_choice="forecast")


class Forecast(BaseModel):
    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2]


@function_tool
def forecast(unit: Literal["celsius", "kelvin"], days: Literal[1, 2]) -> str:
    """The weather."""
    return f"{unit} {days}"


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url() + "/v1", api_key="none", timeout=120, max_retries=0)


def responses_agent(**fields: object) -> Agent:
    model = OpenAIResponsesModel(MODEL, openai_client=client())
    return Agent(**{"name": "helper", "model": model, "model_settings": SHORT, **fields})


def chat_agent(**fields: object) -> Agent:
    model = OpenAIChatCompletionsModel(MODEL, openai_client=client())
    return Agent(**{"name": "helper", "model": model, "model_settings": SHORT, **fields})


def ask(agent: Agent, question: object = QUESTION, **more: object) -> object:
    return LOOP.run_until_complete(Runner.run(agent, question, run_config=QUIET, **more))


def first_turn() -> None:
    expect(ANSWER in ask(responses_agent()).final_output, "the answer")


def first_turn_of_chat() -> None:
    expect(ANSWER in ask(chat_agent()).final_output, "the answer")


def resent_items() -> None:
    for agent in (responses_agent(), chat_agent()):
        first = ask(agent)
        second = ask(agent, [*first.to_input_list(), {"role": "user", "content": NEXT_QUESTION}])
        expect(second.final_output, second)


def previous_response_id() -> None:
    first = ask(responses_agent())
    second = ask(responses_agent(), NEXT_QUESTION, previous_response_id=first.last_response_id)
    expect(second.final_output, second)


def session() -> None:
    kept = SQLiteSession("one")
    ask(responses_agent(), session=kept)
    expect(ask(responses_agent(), NEXT_QUESTION, session=kept).final_output, "an answer")


def called(agent: Agent) -> None:
    """Let the agent call its tool; a schema ends the answer after it, where the default model may ramble."""
    found = ask(agent)
    kinds = [item.type for item in found.new_items]
    expect("tool_call_item" in kinds and "tool_call_output_item" in kinds, kinds)
    expect(isinstance(found.final_output, Forecast), found)


def tool_of_responses() -> None:
    called(responses_agent(tools=[forecast], output_type=Forecast, model_settings=CALLING))


def tool_of_chat() -> None:
    called(chat_agent(tools=[forecast], output_type=Forecast, model_settings=CALLING))


def streamed(agent: Agent, kind: str) -> None:
    async def collect() -> tuple[list[str], str]:
        found = Runner.run_streamed(agent, QUESTION, run_config=QUIET)
        kinds = [event.data.type async for event in found.stream_events() if event.type == "raw_response_event"]
        return kinds, found.final_output

    kinds, final = LOOP.run_until_complete(collect())
    expect(kinds.count(kind) > 3 and ANSWER in final, kinds)


def stream_of_responses() -> None:
    streamed(responses_agent(), "response.output_text.delta")


def stream_of_chat() -> None:
    streamed(chat_agent(), "response.output_text.delta")


def output_type() -> None:
    for agent in (responses_agent(output_type=Forecast), chat_agent(output_type=Forecast)):
        expect(isinstance(ask(agent).final_output, Forecast), "parsed")


def web_search_beside_text() -> None:
    expect(ask(responses_agent(tools=[WebSearchTool()])).final_output, "an answer without the tool")


run(
    first_turn=(first_turn, first_turn_of_chat),
    second_turn=(resent_items, previous_response_id, session),
    tool=(tool_of_responses, tool_of_chat),
    streaming=(stream_of_responses, stream_of_chat),
    structured=(output_type,),
    more=(web_search_beside_text,),
)
