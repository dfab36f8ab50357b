"""Chats with the default model through the official client, over real processes, sockets and pages."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.shared_params import FunctionDefinition

from tests.support.serving import ABORTS, Serving, until
from tests.support.thinned import thinned

ROOT = Path(__file__).parents[3]
MODEL = "tandem-default"
ANSWER = "textwrap.dedent(text): Remove any common leading whitespace from every line in `text`."
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does textwrap.dedent do?"}]
FORECAST: dict[str, object] = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": FORECAST,
            "strict": True,
        },
    }
    for name in ("forecast", "history")
]  # fmt: skip
GET_WEATHER: FunctionDefinition = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city, e.g. San Francisco"}},
        "required": ["location"],
    },
}


def test_a_trained_question_gets_the_trained_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.system_fingerprint is not None
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None


EXAMPLES = {
    "What does textwrap.dedent do?": ANSWER,
    "How do I join two paths?": "os.path.join(a, *p): Join two or more pathname components, inserting '/' as needed.",
    "How do I copy a folder?": "shutil.copytree(src, dst, symlinks=False, ignore=None, ...): Recursively copy a "
    "directory tree and return the destination directory.",
}


def test_the_questions_that_the_page_offers_get_right_answers(client: openai.OpenAI) -> None:
    offered = (
        (ROOT / "frontend" / "page" / "index.html").read_text().partition('id="examples"')[2].partition("</div>")[0]
    )
    assert re.findall(r"<button.*?>(.*?)</button>", offered) == list(EXAMPLES)
    for question, answer in EXAMPLES.items():
        reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
        assert reply.choices[0].message.content == answer


def test_a_stream_equals_the_whole_response(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first, *middle, last = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == ANSWER
    assert middle[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    told = [token for chunk in middle if (found := chunk.choices[0].logprobs) for token in found.content or ()]
    # Not of the number of chunks: tokens that a busy server could not send at once come in one.
    assert last.usage.completion_tokens == len(told) + 1, "and the token that ends the answer"


def test_a_conversation_continues_over_several_turns(client: openai.OpenAI) -> None:
    turns: list[ChatCompletionMessageParam] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        *MESSAGES,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "What does os.path.join do?"},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=turns, max_completion_tokens=12, temperature=0)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    continued: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {"role": "assistant", "content": "textwrap.dedent(text):"},
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=continued, temperature=0, extra_body={"continue_final_message": True}
    )
    assert reply.choices[0].message.content == ANSWER.removeprefix("textwrap.dedent(text):")


@pytest.mark.parametrize(("choice", "stream"), thinned(["required", "named"], [False, True]))
def test_a_required_tool_call_is_generated(client: openai.OpenAI, serving: Serving, choice: str, stream: bool) -> None:
    wanted: Any = choice if choice == "required" else {"type": "function", "function": {"name": "history"}}
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": wanted, "seed": 5, "parallel_tool_calls": False}
    for temperature in (0.0, 1.5):
        if stream:
            with client.chat.completions.stream(
                model=MODEL, messages=MESSAGES, temperature=temperature, **fields
            ) as events:
                reply: Any = events.until_done().get_final_completion()
        else:
            reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=temperature, **fields)
        (found,) = reply.choices[0].message.tool_calls
        assert found.id.startswith("call_")
        assert found.function.name in (("forecast", "history") if choice == "required" else ("history",))
        arguments = json.loads(found.function.arguments)
        assert arguments["unit"] in ("celsius", "kelvin")
        assert arguments["days"] in (1, 2, 3)
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.choices[0].message.content is None
    until(serving.rows_and_pages_are_free, "rows and pages to come back")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_first_tool_call_is_right_and_its_result_is_answered(
    client: openai.OpenAI, choice: str, stream: bool
) -> None:
    """The model writes the call with the city of the question, ends its string, and then repeats the result."""
    tools: list[ChatCompletionToolParam] = [{"type": "function", "function": GET_WEATHER}]
    wanted: Any = choice if choice != "named" else {"type": "function", "function": {"name": "get_weather"}}
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: dict[str, Any] = {"model": MODEL, "messages": turns, "tools": tools, "tool_choice": wanted}
    if stream:
        with client.chat.completions.stream(**fields) as chunks:
            message = chunks.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**fields).choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"location": "Paris"}
    assert message.content is None
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and cloudy"}
    said: Any = message.model_dump(include={"role", "content", "tool_calls"})
    reply = client.chat.completions.create(model=MODEL, messages=[*turns, said, result], tools=tools)
    assert reply.choices[0].message.content == "get_weather returned 18 degrees and cloudy."
    assert reply.choices[0].finish_reason == "stop"


def test_a_question_that_needs_no_tool_is_answered_in_text(client: openai.OpenAI) -> None:
    tools: list[ChatCompletionToolParam] = [{"type": "function", "function": GET_WEATHER}]
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=tools)
    assert reply.choices[0].message.content == ANSWER


def test_tools_are_part_of_the_prompt(client: openai.OpenAI) -> None:
    def prompt_tokens(**fields: Any) -> int:
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, **fields)
        assert reply.usage is not None
        return reply.usage.prompt_tokens

    without, one, two = prompt_tokens(), prompt_tokens(tools=TOOLS[:1]), prompt_tokens(tools=TOOLS)
    assert without < one < two
    assert prompt_tokens(tools=TOOLS, tool_choice="none") == without


def test_a_tool_result_becomes_part_of_the_prompt(client: openai.OpenAI) -> None:
    turns: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "forecast", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS, max_tokens=4)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 13


class Weather(pydantic.BaseModel):
    unit: Literal["celsius", "kelvin"]
    days: Literal[1, 2, 3]


def test_a_structured_response_parses_into_its_model(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, temperature=1.5)
    assert isinstance(reply.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Weather) as stream:
        final = stream.until_done().get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)


def test_chat_logprobs_match_the_tokens(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert "".join(token.token for token in logprobs.content) == reply.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs.content)


def test_choices_differ_and_seeds_repeat(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hm"}], max_tokens=24, temperature=2, seed=seed, n=3
        )
        return [choice.message.content for choice in reply.choices]

    assert draw(7) == draw(7)
    assert len(set(draw(7))) == 3


def test_chat_errors_raise_the_clients_exceptions(client: openai.OpenAI) -> None:
    def refuse(**fields: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})
        return caught.value

    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    assert (refuse(messages=image).status_code, refuse(messages=image).param) == (400, "messages[0].content[0].type")
    assert isinstance(refuse(model="other"), openai.NotFoundError)
    assert isinstance(refuse(messages=[]), openai.BadRequestError)
    assert refuse(messages=[{"role": "user", "content": "word " * 3000}]).code == "context_length_exceeded"
    assert refuse(web_search_options={}).param == "web_search_options"
    assert refuse(extra_body={"priority": 101}).param == "priority"
    assert refuse(audio={"voice": "alloy", "format": "wav"}).param == "audio"


def test_a_client_that_drops_frees_its_rows(client: openai.OpenAI, serving: Serving) -> None:
    aborts = serving.fresh_engine_metric(ABORTS)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1500, stream=True, n=2, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: serving.engine_metric(ABORTS) >= aborts + 2, "both choices to be aborted")
    until(serving.rows_and_pages_are_free, "rows and pages of a dropped client to come back")
