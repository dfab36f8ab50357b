"""Pieces of a choice as deltas of a message."""

from tandem.frontend.chat.deltas import CallArguments, CallStart, Content, MessageDelta, Reasoning
from tandem.frontend.chat.message import Call, Message, MessageShape, whole_message
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse

USE = ToolUse((Tool("look", None, False, {}),), ToolChoice("auto"))
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


def piece(text: str, finish: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(0, text, [7] * len(text.split()), finish)


def test_without_tools_and_thoughts_all_is_content() -> None:
    shape = MessageShape()
    assert shape.plain
    parser = shape.parser()
    assert parser.push(piece(CALL)) == [Content(CALL)]
    assert parser.push(piece("", "stop")) == []
    assert parser.finish_reason("stop") == "stop"


def test_thoughts_then_content_then_a_call() -> None:
    shape = MessageShape(USE, FORMATS["hermes"], reasoning=True, close_id=8)
    assert not shape.plain
    parser = shape.parser()
    deltas: list[MessageDelta] = []
    deltas += parser.push(ChoiceDelta(0, "<think>what to", [7, 7], None))
    deltas += parser.push(ChoiceDelta(0, " do</think>\n\nI look. ", [7, 8, 7, 7], None))
    deltas += parser.push(piece(CALL))
    deltas += parser.push(piece("", "stop"))
    message = whole_message(deltas)
    assert (message.reasoning, message.content) == ("what to do", "I look.")
    assert [(call.name, call.arguments) for call in message.calls] == [("look", '{"at": 1}')]
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"
    assert parser.reasoning_tokens == 4


def test_thoughts_are_counted_where_one_token_closes_them() -> None:
    unknown = MessageShape(reasoning=True).parser()
    unknown.push(ChoiceDelta(0, "<think>a", [7], None))
    assert unknown.reasoning_tokens is None
    none = MessageShape(reasoning=True, close_id=8).parser()
    none.push(ChoiceDelta(0, "an answer", [7, 7], "stop"))
    assert none.reasoning_tokens == 0
    endless = MessageShape(reasoning=True, thoughts_open=True, close_id=8).parser()
    endless.push(ChoiceDelta(0, "on and on", [7, 7, 7], "length"))
    assert endless.reasoning_tokens == 3


def test_a_call_within_thoughts_is_none() -> None:
    parser = MessageShape(USE, FORMATS["hermes"], reasoning=True, thoughts_open=True).parser()
    deltas = parser.push(piece(f"maybe {CALL}", "length"))
    assert deltas == [Reasoning(f"maybe {CALL}")]
    assert parser.num_calls == 0


def test_what_was_held_back_comes_with_the_end() -> None:
    parser = MessageShape(USE, FORMATS["hermes"]).parser()
    assert parser.push(piece("half <tool_")) == [Content("half")]
    assert parser.push(piece("", "length")) == [Content(" <tool_")]


def test_a_whole_message() -> None:
    deltas: list[MessageDelta] = [
        CallStart(0, "x", "a"), CallArguments(0, "{"), CallArguments(0, "}"), CallStart(1, "y", "b"),
        CallArguments(1, "{}"),
    ]  # fmt: skip
    assert whole_message(deltas) == Message(None, None, [Call("x", "a", "{}"), Call("y", "b", "{}")])
    assert whole_message([]) == Message("", None, [])
    assert whole_message([Content("a"), Content("b")]) == Message("ab", None, [])
