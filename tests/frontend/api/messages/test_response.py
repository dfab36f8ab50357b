"""Formatting of messages: whole and streamed are the same, however the text is split."""

import itertools
import json
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tandem.frontend.api.messages.blocks import INVALID_JSON
from tandem.frontend.api.messages.request import parse_message_request
from tandem.frontend.api.messages.response import MessagesFormatter
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted, AdmittedPrompt
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.output_tags import Tag
from tandem.frontend.generation.usage import PromptDetails, Usage
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.events import ModelFacts
from tests.support.tool_answers import CALL, SHAPE, TEXTS, THINK_END, TOKEN_SHAPE

USAGE = Usage(30, 4, 34, PromptDetails(16))
BODY = b'{"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "x"}]}'
MODEL = ModelFacts("m", 420, 2048, [1], "", "cpu", "float32", 0)


def format_of(shape: MessageShape = SHAPE, room: int = 10, hide_thinking: bool = False) -> MessagesFormatter:
    prompt = AdmittedPrompt("", [5] * 30, b"", room)
    parsed = parse_message_request(BODY, IgnoredFields())
    options = structs.replace(parsed.options, max_tokens=10)
    return MessagesFormatter(Admitted(options, MODEL, [prompt], options.sampling), shape, hide_thinking, "req_1")


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Parse the events, and check that they are named like their type."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    events: list[dict[str, Any]] = []
    for block in blocks:
        name, _, body = block.partition("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(texts: list[str], end: ChoiceDelta, form: MessagesFormatter) -> list[dict[str, Any]]:
    pieces = [*(ChoiceDelta(0, text, [7], None) for text in texts), end]
    return events_of(form.opening(USAGE) + b"".join(form.batch([piece]) for piece in pieces) + form.closing(USAGE))


def whole(text: str, finish: str = "stop", stop: str | None = None, **settings: Any) -> dict[str, Any]:
    piece = ChoiceDelta(0, text, [7, 1], finish, stop_string=stop)
    reply: dict[str, Any] = json.loads(format_of(**settings).whole([piece], USAGE))
    return reply


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    """Remove ids and what depends on the number of tokens."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "usage": None, "content": blocks}


def replay(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Rebuild the message from the events as a client does, and check their order."""
    first, *between, changed, stopped = events
    assert (first["type"], changed["type"], stopped["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    text, is_open = "", False
    for event in between:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        match event["type"], event:
            case "content_block_start", {"content_block": block}:
                assert not is_open
                message["content"].append(block)
                text, is_open = "", True
            case "content_block_delta", {"delta": {"type": "signature_delta", "signature": signature}}:
                message["content"][-1]["signature"] = signature
            case "content_block_delta", {"delta": {"type": "input_json_delta", "partial_json": part}}:
                text += part
            case "content_block_delta", {"delta": {"type": kind, **fields}}:
                name = kind.removesuffix("_delta")
                message["content"][-1][name] += fields[name]
            case kind, _:
                assert kind == "content_block_stop" and is_open
                is_open = False
                if text:
                    message["content"][-1]["input"] = decoded(text)
    assert not is_open
    return {**message, **changed["delta"], "usage": {**message["usage"], **changed["usage"]}}


def decoded(text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError:
        return {INVALID_JSON: text}
    return value


@given(st.data(), st.sampled_from(TEXTS), st.sampled_from(["stop", "length"]), st.booleans())
def test_message_is_the_same_whole_and_streamed(
    data: st.DataObject, text: str, finish: str, hide_thinking: bool
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    events = stream(pieces, ChoiceDelta(0, "", [1], finish), format_of(hide_thinking=hide_thinking))
    assert anonymous(replay(events)) == anonymous(whole(text, finish, hide_thinking=hide_thinking))


def test_message_events_have_the_order_of_their_blocks() -> None:
    begun, delta, ended = "content_block_start", "content_block_delta", "content_block_stop"
    found = stream([f"<think>hm</think>I look.\n{CALL}"], ChoiceDelta(0, "", [1], "stop"), format_of())
    assert [event["type"] for event in found] == [
        "message_start",
        *(begun, delta, delta, ended),
        *(begun, delta, ended),
        *(begun, delta, ended),
        "message_delta", "message_stop",
    ]  # fmt: skip
    kinds = [event["delta"]["type"] for event in found if event["type"] == delta]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_message_matches_the_official_types(finish: str) -> None:
    from anthropic.types import Message, RawMessageStreamEvent

    known: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
    for text in TEXTS:
        Message.model_validate(whole(text, finish), strict=True)
        for event in stream([text], ChoiceDelta(0, "", [1], finish), format_of()):
            assert known.validate_python(event, strict=True).type == event["type"]


@pytest.mark.parametrize(
    ("text", "finish", "stop", "room", "reason"),
    [
        ("some", "stop", None, 10, "end_turn"), ("some", "length", None, 10, "max_tokens"),
        ("some", "length", None, 9, "model_context_window_exceeded"), ("some", "stop", "END", 10, "stop_sequence"),
        (CALL, "stop", None, 10, "tool_use"), (CALL, "length", None, 10, "max_tokens"),
        (CALL, "stop", "END", 10, "stop_sequence"), ("", "stop", None, 10, "end_turn"),
    ],
)  # fmt: skip
def test_stop_reason_tells_how_the_output_ended(
    text: str, finish: str, stop: str | None, room: int, reason: str
) -> None:
    message = whole(text, finish, stop, room=room)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    end = ChoiceDelta(0, "", [1], finish, stop_string=stop)
    delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}
    assert stream([text], end, format_of(room=room))[-2]["delta"] == delta


REQUIRED = {
    "message": {
        "id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container",
    },
    "usage": {
        "cache_creation", "cache_creation_input_tokens", "cache_read_input_tokens", "inference_geo", "input_tokens",
        "output_tokens", "output_tokens_details", "server_tool_use", "service_tier",
    },
    "delta": {"container", "stop_details", "stop_reason", "stop_sequence"},
    "delta_usage": {
        "cache_creation_input_tokens", "cache_read_input_tokens", "input_tokens", "output_tokens",
        "output_tokens_details", "server_tool_use",
    },
    "text": {"citations", "text", "type"},
    "thinking": {"signature", "thinking", "type"},
    "tool_use": {"caller", "id", "input", "name", "type"},
}  # fmt: skip
"""The properties that Anthropic's published schema requires."""


def test_every_property_that_the_published_schema_requires_is_present() -> None:
    text = f"<think>hm</think>I look.\n{CALL}"
    for shape, tags in ((SHAPE, []), (TOKEN_SHAPE, [Tag(9, THINK_END)])):
        piece = ChoiceDelta(0, text, [7, 1], "stop", tags=tags)
        message = json.loads(format_of(shape).whole([piece], USAGE))
        form = format_of(shape)
        started, *_, changed, _ = found = events_of(form.opening(USAGE) + form.batch([piece]) + form.closing(USAGE))
        for shown in (message, started["message"]):
            assert shown.keys() >= REQUIRED["message"]
            assert shown["usage"].keys() >= REQUIRED["usage"]
        assert changed["delta"].keys() >= REQUIRED["delta"]
        assert changed["usage"].keys() >= REQUIRED["delta_usage"]
        begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        for blocks in (message["content"], begun):
            assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
            assert all(block.keys() >= REQUIRED[block["type"]] for block in blocks)


def test_usage_counts_cached_tokens_apart() -> None:
    wanted = {
        "input_tokens": 14, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0, "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0}, "server_tool_use": None,
    }  # fmt: skip
    assert whole("some")["usage"] == {**wanted, "cache_creation": None, "inference_geo": None, "service_tier": None}
    events = stream(["some"], ChoiceDelta(0, "", [1], "stop"), format_of())
    assert events[0]["message"]["usage"]["input_tokens"] == 14
    assert events[-2]["usage"] == wanted


def test_thinking_is_signed_and_counted() -> None:
    form = format_of(TOKEN_SHAPE)
    pieces = [
        ChoiceDelta(0, "<think>a b</think>c", [7, 7, 8, 7], None, tags=[Tag(10, THINK_END)]),
        ChoiceDelta(0, "", [1], "stop"),
    ]
    events = events_of(form.opening(USAGE) + form.batch(pieces) + form.closing(USAGE))
    (thinking, _) = replay(events)["content"]
    assert (thinking["thinking"], bool(thinking["signature"])) == ("a b", True)
    assert events[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_hidden_thinking_keeps_its_block_and_signature() -> None:
    shown, hidden = (whole(TEXTS[4], hide_thinking=hide)["content"][0] for hide in (False, True))
    assert hidden == {**shown, "thinking": ""}


def test_input_that_is_not_json_is_returned_as_text() -> None:
    cut = whole(f"one\n{CALL[:-17]}", "length")
    text, call = cut["content"]
    assert text == {"type": "text", "text": "one", "citations": None}
    assert (call["type"], call["name"], list(call["input"])) == ("tool_use", "look", [INVALID_JSON])
    wrong = whole('<tool_call>\n{"name": "look", "arguments": {at: 1}}\n</tool_call>')
    assert wrong["content"][0]["input"] == {INVALID_JSON: "{at: 1}"}


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "overloaded", "overloaded_error"), (503, "shutting_down", "overloaded_error"),
        (500, "engine_failed", "api_error"), (400, "kv_capacity_exceeded", "invalid_request_error"),
    ],
)  # fmt: skip
def test_failure_of_a_stream_is_an_error_event(status: int, code: str, kind: str) -> None:
    from anthropic.types import ErrorResponse

    form = format_of()
    begun = form.opening(USAGE) + form.batch([ChoiceDelta(0, "so fa", [7], None)])
    *_, error = events_of(begun + form.failure(ApiError(status, "no more", None, code)))
    assert error == {"type": "error", "error": {"type": kind, "message": "no more"}, "request_id": "req_1"}
    ErrorResponse.model_validate(error, strict=True)
