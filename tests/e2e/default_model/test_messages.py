"""The default model through Anthropic's client, over real processes and sockets."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.serving import GUARD_SECONDS, Serving

# Its 3,000 modules take seconds to load, in every process of tests: only a test that needs it loads it.
if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message, MessageParam

MODEL = "tandem-default"
ANSWER = "textwrap.dedent(text): Remove any common leading whitespace from every line in `text`."
QUESTION: "MessageParam" = {"role": "user", "content": "What does textwrap.dedent do?"}
FORECAST: dict[str, Any] = {
    "name": "forecast",
    "input_schema": {
        "type": "object",
        "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}

GET_WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}


@pytest.fixture
def anthropic_client(serving: Serving) -> "Iterator[Anthropic]":
    from anthropic import Anthropic

    with Anthropic(base_url=serving.url, api_key="none", timeout=GUARD_SECONDS, max_retries=0) as client:
        yield client


def prompt_size(message: "Message") -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_conversation_of_messages_goes_on(anthropic_client: "Anthropic") -> None:
    from anthropic.types import TextBlock

    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "extra_body": {"temperature": 0}}
    with anthropic_client.messages.stream(messages=[QUESTION], **fields) as stream:
        parts = list(stream.text_stream)
        first = stream.get_final_message()
    assert "".join(parts) == ANSWER
    assert first.stop_reason == "end_turn" and first.usage.output_tokens > 0
    turns: list[MessageParam] = [QUESTION, {"role": "assistant", "content": first.content}, QUESTION]
    second = anthropic_client.messages.create(messages=turns, **fields)
    assert isinstance(second.content[0], TextBlock)
    assert prompt_size(second) > prompt_size(first) + 10


def test_a_tool_is_called_and_its_result_read(anthropic_client: "Anthropic") -> None:
    from anthropic.types import ToolUseBlock

    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": [FORECAST]}
    named = {"type": "tool", "name": "forecast"}
    first = anthropic_client.messages.create(messages=[QUESTION], tool_choice=named, **fields)
    (call,) = first.content
    assert isinstance(call, ToolUseBlock) and call.input["unit"] in ("celsius", "kelvin")
    assert first.stop_reason == "tool_use"
    result: MessageParam = {
        "role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "21"}],
    }  # fmt: skip
    turns: list[MessageParam] = [QUESTION, {"role": "assistant", "content": first.content}, result]
    second = anthropic_client.messages.create(messages=turns, **fields)
    assert prompt_size(second) > prompt_size(first)
    assert second.content


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_a_first_tool_call_is_right_and_its_result_is_answered(anthropic_client: "Anthropic", choice: str) -> None:
    from anthropic.types import TextBlock, ToolUseBlock

    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 128, "tools": [GET_WEATHER]}
    question: MessageParam = {"role": "user", "content": "What is the weather in Paris?"}
    first = anthropic_client.messages.create(messages=[question], tool_choice={"type": choice}, **fields)
    (call,) = first.content
    assert isinstance(call, ToolUseBlock) and call.name == "get_weather" and call.input == {"location": "Paris"}
    result: MessageParam = {
        "role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}],
    }  # fmt: skip
    turns: list[MessageParam] = [question, {"role": "assistant", "content": first.content}, result]
    (block,) = anthropic_client.messages.create(messages=turns, **fields).content
    assert isinstance(block, TextBlock) and block.text == "get_weather returned 18 degrees."
