"""Formatting of chat responses: streamed and whole, the message is the same."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.chat_completions.response import ChatFormatter
from tandem.frontend.api.completions.response import CompletionFormatter
from tandem.frontend.api.formatter import Formatter
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.errors import unavailable
from tandem.frontend.generation.admission import Admitted, AdmittedPrompt
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.output_tags import OutputTags
from tandem.frontend.generation.scored_tokens import ScoredToken
from tandem.frontend.generation.usage import Usage
from tandem.frontend.grammar.grammar import ThinkingMode
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse
from tandem.protocol.events import ModelFacts
from tandem.protocol.params import SamplingParams

MODEL = ModelFacts("m", 420, 2048, [1], "", "cpu", "float32", 0)
USE = ToolUse((Tool("look", None, False, {}),), ToolChoice("auto"))
CALL = '<tool_call>{"name": "look", "arguments": {"at": "ü\\n"}}</tool_call>'
PLAIN = MessageShape()
RICH = MessageShape(USE, FORMATS["hermes"], OutputTags(thinking=ThinkingMode.OPTIONAL))
SCORED = ScoredToken(b"a", -0.5, [(b"b", -1.0)], 0)
PIECES = [
    ChoiceDelta(0, "Hm", [5], None),
    ChoiceDelta(0, ', "ü\u2028', [6, 7], None),
    ChoiceDelta(0, "", [8], None),
    ChoiceDelta(0, f".\n{CALL}", [9], None),
    ChoiceDelta(0, "", [], "stop"),
]


def admitted(**fields: Any) -> Admitted:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    options = parse_chat(msgspec.json.encode(body), 16, IgnoredFields()).options
    return Admitted(options, MODEL, [AdmittedPrompt("x", [3, 4], b"", 16)], SamplingParams(16))


def chunks(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"data: [DONE]\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n")[:-2]]


def streamed(shape: MessageShape, pieces: list[ChoiceDelta], **fields: Any) -> list[dict[str, Any]]:
    formatter = ChatFormatter(admitted(stream=True, **fields), shape)
    usage = Usage(2, 5, 7)
    data = formatter.opening(usage) + b"".join(formatter.batch([piece]) for piece in pieces)
    found = chunks(data + formatter.closing(usage))
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return found


def whole(shape: MessageShape, pieces: list[ChoiceDelta], **fields: Any) -> dict[str, Any]:
    joined = ChoiceDelta(
        0,
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.token_ids],
        pieces[-1].finish_reason,
        [token for piece in pieces for token in piece.logprobs],
    )
    reply: dict[str, Any] = json.loads(ChatFormatter(admitted(**fields), shape).whole([joined], Usage(2, 5, 7)))
    ChatCompletion.model_validate(reply, strict=True)
    return reply


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("shape", [PLAIN, RICH])
def test_chat_stream_adds_up_to_the_whole_message(shape: MessageShape, ids: bool) -> None:
    fields = {"return_token_ids": ids}
    found = [chunk["choices"][0] for chunk in streamed(shape, PIECES, **fields)]
    choice = whole(shape, PIECES, **fields)["choices"][0]
    content = "".join(part["delta"].get("content") or "" for part in found)
    assert content == choice["message"]["content"]
    assert found[-1]["finish_reason"] == choice["finish_reason"]
    calls = [part["delta"]["tool_calls"][0] for part in found if "tool_calls" in part["delta"]]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    if shape is RICH:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": arguments}
    else:
        assert (choice["finish_reason"], calls) == ("stop", [])
    if ids:
        assert (
            [token for part in found for token in part.get("token_ids", [])] == choice["token_ids"] == [5, 6, 7, 8, 9]
        )
        assert found[0]["prompt_token_ids"] == choice["prompt_token_ids"] == [3, 4]
    else:
        assert not any("token_ids" in part or "prompt_token_ids" in part for part in (*found, choice))


def test_first_chunk_has_the_role_and_last_the_finish_reason() -> None:
    first, *_, last = [chunk["choices"][0] for chunk in streamed(PLAIN, PIECES)]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert streamed(RICH, PIECES)[0]["choices"][0]["delta"]["content"] is None


def test_logprobs_come_with_the_first_delta_of_their_piece() -> None:
    pieces = [
        ChoiceDelta(0, "a", [5], None, [SCORED]),
        ChoiceDelta(0, "", [6], None, [SCORED]),
        ChoiceDelta(0, "", [], "stop"),
    ]
    found = [chunk["choices"][0] for chunk in streamed(PLAIN, pieces, logprobs=True, top_logprobs=1)][1:]
    assert [len((part["logprobs"] or {"content": []})["content"]) for part in found] == [1, 1, 0]
    choice = whole(PLAIN, pieces, logprobs=True, top_logprobs=1)["choices"][0]
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["a", "a"]


def test_usage_chunk_follows_the_last_choice() -> None:
    *found, last = streamed(PLAIN, PIECES, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in found)
    expected = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert (last["choices"], expected.items() <= last["usage"].items()) == ([], True)
    assert expected.items() <= whole(PLAIN, PIECES)["usage"].items()
    assert "usage" not in streamed(PLAIN, PIECES)[-1]


def test_message_of_only_tool_calls_has_null_content() -> None:
    message = whole(RICH, [ChoiceDelta(0, CALL, [5], "stop")])["choices"][0]["message"]
    assert message["content"] is None
    message = whole(RICH, [ChoiceDelta(0, "<think>hm</think>", [5], "length")])["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert whole(PLAIN, [ChoiceDelta(0, "", [1], "stop")])["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("kind", [ChatFormatter, CompletionFormatter])
def test_error_event_ends_a_stream(kind: Any) -> None:
    formatter: Formatter = (
        kind(admitted(stream=True), PLAIN) if kind is ChatFormatter else kind(admitted(stream=True), False)
    )
    (event,) = chunks(formatter.failure(unavailable("gone")))
    assert event["error"]["message"] == "gone"
