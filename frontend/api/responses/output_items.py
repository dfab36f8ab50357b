"""Build the output items of a response and their stream events."""

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from tandem.frontend.api.responses.carried_reasoning import carried_reasoning
from tandem.frontend.api.responses.custom_input import CustomInput
from tandem.frontend.api.responses.message_logprobs import MessageLogprobs
from tandem.frontend.api.responses.tools import ToolName
from tandem.frontend.chat.message import CallArguments, CallStart, Content, MessageDelta, Reasoning

StreamEvent = tuple[str, dict[str, Any]]
"""Type and fields of an event, without `sequence_number`."""

OutputStatus = Literal["completed", "incomplete"]
_TextKind = Literal["message", "reasoning"]
_STREAMED = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class OutputItems:
    """Assemble the deltas of one choice into items, in the order in which they begin.

    A delta of another type, or another call, ends the open item. The items do not depend on how the text is split into
    deltas. `names` maps the tool names that the model writes to the client's; `logprobs` has the log-probabilities of
    the output's tokens, assigned to each message when it ends. With `carries_reasoning`, reasoning items repeat their
    text in `encrypted_content`.
    """

    def __init__(self, names: Mapping[str, ToolName], logprobs: MessageLogprobs, carries_reasoning: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._carries_reasoning = carries_reasoning
        self._logprobs = logprobs
        self._names = names
        self._open: str | None = None
        """Type of the open item; None if no item is open."""
        self._parts: list[str] = []
        """Text of the open item so far, as a list of parts."""
        self._input = CustomInput()
        """Decoder of the open item's input if it is a custom tool call, else None."""

    def write(self, delta: MessageDelta) -> list[StreamEvent]:
        """Process a delta and return its events."""
        match delta:
            case Content(text):
                return [*self._text_item("message"), self._text_delta("message", text)]
            case Reasoning(text):
                return [*self._text_item("reasoning"), self._text_delta("reasoning", text)]
            case CallStart(_, call_id, name):
                return [*self.end("completed"), self._begin_call(call_id, self._names.get(name) or ToolName(name))]
            case CallArguments(_, text) if self._open == "custom_tool_call":
                return self._input_delta(self._input.push(text))
            case CallArguments(_, text):
                assert self._open == "function_call", f"arguments within {self._open}: {text!r}"
                self._parts.append(text)
                return [self._event("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: OutputStatus) -> list[StreamEvent]:
        """End the output; add an empty message to an output without items."""
        begun = [] if self.items else self._text_item("message")
        return begun + self.end(status)

    def end(self, status: OutputStatus) -> list[StreamEvent]:
        """End the open item, if any."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        text, self._parts = "".join(self._parts), []
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        elif kind == "custom_tool_call":
            rest = self._input_delta(self._input.finish())
            item["input"] = self._input.text
            events = [*rest, self._event("response.custom_tool_call_input.done", input=item["input"])]
        else:
            logprobs = self._logprobs.take(text) if kind == "message" else []
            part = _part(kind, text, logprobs)
            item["content"] = [part]
            if kind == "reasoning" and self._carries_reasoning:
                item["encrypted_content"] = carried_reasoning(text)
            events = [
                self._event(f"{_STREAMED[kind]}.done", content_index=0, text=text, **_logprobs(kind, logprobs)),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._item_event("response.output_item.done")]

    def _begin_call(self, call_id: str, tool: ToolName) -> StreamEvent:
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        if tool.is_custom:
            self._input = CustomInput()
            return self._add("custom_tool_call", "ctc", call_id=call_id, name=tool.name, input="", **namespace)
        return self._add("function_call", "fc", call_id=call_id, name=tool.name, arguments="", **namespace)

    def _input_delta(self, text: str) -> list[StreamEvent]:
        return [self._event("response.custom_tool_call_input.delta", delta=text)] if text else []

    def _text_item(self, kind: _TextKind) -> list[StreamEvent]:
        """Begin a text item unless one of this type is open."""
        if self._open == kind:
            return []
        ended = self.end("completed")
        if kind == "message":
            added = self._add(kind, "msg", role="assistant", content=[])
        else:
            added = self._add(kind, "rs", summary=[], content=[])
        return [*ended, added, self._event("response.content_part.added", content_index=0, part=_part(kind, "", []))]

    def _text_delta(self, kind: _TextKind, text: str) -> StreamEvent:
        self._parts.append(text)
        return self._event(f"{_STREAMED[kind]}.delta", content_index=0, delta=text, **_logprobs(kind, []))

    def _add(self, kind: str, prefix: str, **fields: Any) -> StreamEvent:
        self._open = kind
        item_id = f"{prefix}_{secrets.token_hex(24)}"
        self.items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        return self._item_event("response.output_item.added")

    def _event(self, event: str, **fields: Any) -> StreamEvent:
        return event, {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, event: str) -> StreamEvent:
        return event, {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}


def _logprobs(kind: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the field `logprobs`, which OpenAI's types require for message text even if it is empty."""
    return {"logprobs": logprobs} if kind == "message" else {}
