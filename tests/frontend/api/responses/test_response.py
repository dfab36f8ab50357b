"""Formatting of responses: whole and streamed are the same, however the text is split."""

import itertools
import json
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from tandem.frontend.api.responses.request import parse_responses
from tandem.frontend.api.responses.response import ResponsesFormatter
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.output_tags import Tag
from tandem.frontend.generation.usage import Usage
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.support.tool_answers import CALL, SHAPE, TEXTS, THINK_END, TOKEN_SHAPE

USAGE = Usage(3, 4, 7)
BODY = b'{"model": "m", "input": "x", "tools": [{"type": "function", "name": "look", "strict": true}]}'
SETTINGS = {"store": False, "metadata": {"a": "b"}}


def format_of(shape: MessageShape = SHAPE) -> ResponsesFormatter:
    return ResponsesFormatter("m", shape, SETTINGS)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Parse the events, and check that they are named like their type and numbered in order."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    events: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        name, _, body = block.partition("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def stream(texts: list[str], finish: str = "stop", shape: MessageShape = SHAPE) -> list[dict[str, Any]]:
    form = format_of(shape)
    pieces = [*(ChoiceDelta(0, text, [7], None) for text in texts), ChoiceDelta(0, "", [1], finish)]
    return events_of(form.opening(USAGE) + b"".join(form.batch([piece]) for piece in pieces) + form.closing(USAGE))


def whole(text: str, finish: str = "stop") -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(format_of().whole([ChoiceDelta(0, text, [7, 1], finish)], USAGE))
    return reply


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Remove ids, times and everything that depends on the number of tokens."""
    bare = {
        name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at", "usage")
    }
    bare["output"] = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return bare


def replay(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rebuild the output items from the events as a client does, and check their order."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if "output_index" in event:
            assert event["output_index"] == len(items) - (kind != "response.output_item.added")
        if kind == "response.output_item.added":
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert items[-1]["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "response.content_part.done":
            assert items[-1]["content"][event["content_index"]] == event["part"]
        elif kind == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert items[-1]["arguments"] == event["arguments"]
        elif kind == "response.output_item.done":
            assert {**items[-1], "status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
    return items


@given(st.data(), st.sampled_from(TEXTS), st.sampled_from(["stop", "length"]))
def test_response_is_the_same_whole_and_streamed(data: st.DataObject, text: str, finish: str) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    events = stream([text[start:end] for start, end in itertools.pairwise(cuts)], finish)
    last = events[-1]["response"]
    assert anonymous(last) == anonymous(whole(text, finish))
    assert replay(events) == last["output"]


def test_response_events_are_ordered_and_numbered() -> None:
    text = ["response.content_part.added", "response.output_text.delta", "response.output_text.done"]
    thoughts = ["response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.done"]
    arguments = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    added, part, done = "response.output_item.added", "response.content_part.done", "response.output_item.done"
    found = [event["type"] for event in stream([f"<think>hm</think>I look.\n{CALL}"])]
    assert found == [
        "response.created", "response.in_progress",
        added, *thoughts, part, done,
        added, *text, part, done,
        added, *arguments, done,
        "response.completed",
    ]  # fmt: skip


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_response_matches_the_official_types(finish: str) -> None:
    for text in TEXTS:
        Response.model_validate(
            {**whole(text, finish), **parse_responses(BODY, 16, IgnoredFields()).settings}, strict=True
        )
    known = pydantic.TypeAdapter(ResponseStreamEvent)
    for failed in (False, True):
        form = ResponsesFormatter("m", SHAPE, parse_responses(BODY, 16, IgnoredFields()).settings)
        data = form.opening(USAGE) + form.batch([ChoiceDelta(0, TEXTS[3], [7], None), ChoiceDelta(0, "", [1], finish)])
        data += form.failure(ApiError(500, "no more")) if failed else form.closing(USAGE)
        for event in events_of(data):
            assert known.validate_python(event, strict=True).type == event["type"]


def test_response_begins_empty_and_ends_complete() -> None:
    created, in_progress, *_, last = stream(["a", "b"], shape=MessageShape())
    for event in (created, in_progress):
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["usage"] is None
    response = last["response"]
    assert last["type"] == "response.completed"
    assert {name: response[name] for name in SETTINGS} == SETTINGS
    assert response["id"] == created["response"]["id"]
    assert response["completed_at"] >= response["created_at"]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    (item,) = response["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}


@pytest.mark.parametrize("text", ["some", "<think>hm", CALL[:-30], ""])
def test_truncated_output_is_incomplete_in_its_last_item(text: str) -> None:
    last = stream([f"{CALL}{text}"], "length")[-1]
    response = last["response"]
    assert last["type"] == "response.incomplete"
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    *earlier, cut = [item["status"] for item in response["output"]]
    assert cut == "incomplete"
    assert set(earlier) <= {"completed"}


@pytest.mark.parametrize(
    ("status", "code"),
    [(429, "rate_limit_exceeded"), (503, "server_error"), (500, "server_error"), (400, "invalid_prompt")],
)
def test_failure_is_reported_and_ends_the_response(status: int, code: str) -> None:
    form = format_of()
    begun = form.opening(USAGE) + form.batch([ChoiceDelta(0, "so fa", [7], None)])
    *_, done, error, failed = events_of(begun + form.failure(ApiError(status, "no more", None, "engine_failed")))
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert {name: error[name] for name in ("type", "code", "message", "param")} == {
        "type": "error",
        "code": "engine_failed",
        "message": "no more",
        "param": None,
    }
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": "no more"}
    assert failed["response"]["output"] == [done["item"]]


def test_reasoning_tokens_are_counted() -> None:
    form = format_of(TOKEN_SHAPE)
    pieces = [
        ChoiceDelta(0, "<think>a b</think>c", [7, 7, 8, 7], None, tags=[Tag(10, THINK_END)]),
        ChoiceDelta(0, "", [1], "stop"),
    ]
    usage = events_of(form.batch(pieces) + form.closing(USAGE))[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
