"""Content blocks of a message, and their stream events."""

import hashlib
from base64 import b64encode
from typing import Any

import msgspec

from tandem.frontend.chat.message import CallArguments, CallStart, Content, MessageDelta, Reasoning

BlockEvent = tuple[str, dict[str, Any]]
"""Type and fields of an event."""

INVALID_JSON = "INVALID_JSON"
"""Key for tool input that is not a JSON object, as in truncated output; its value is the text."""


class ContentBlocks:
    """Assemble the deltas of one choice into blocks.

    Blocks are in order of their start: another type of output, or another call, ends the previous block. With
    `hide_thinking`, blocks of thinking have no text. Blocks do not depend on how the text is chunked.
    """

    def __init__(self, hide_thinking: bool) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._hide_thinking = hide_thinking
        self._is_open = False
        """True while the last block is open."""
        self._parts: list[str] = []
        """Text of the open block, in parts."""

    def write(self, delta: MessageDelta) -> list[BlockEvent]:
        """Append a delta and return its events."""
        match delta:
            case Content(text):
                begun = self._begin_text({"type": "text", "text": "", "citations": None})
                return [*begun, self._delta("text_delta", "text", text)]
            case Reasoning(text):
                begun = self._begin_text({"type": "thinking", "thinking": "", "signature": ""})
                shown = self._delta("thinking_delta", "thinking", text)
                return begun if self._hide_thinking else [*begun, shown]
            case CallStart(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}
                return [*self.end(), self._begin(call)]
            case CallArguments(_, text):
                return [self._delta("input_json_delta", "partial_json", text)]

    def end(self) -> list[BlockEvent]:
        """End the open block, if any."""
        if not self._is_open:
            return []
        block, text = self.blocks[-1], "".join(self._parts)
        events: list[BlockEvent] = []
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["thinking"] = "" if self._hide_thinking else text
                block["signature"] = _signature(text)
                events.append(self._event("content_block_delta", delta=_signed(block["signature"])))
            case _:
                block["input"] = _tool_input(text)
        self._is_open, self._parts = False, []
        return [*events, self._event("content_block_stop")]

    def _begin_text(self, block: dict[str, Any]) -> list[BlockEvent]:
        """Start a block of text, unless one of this type is open."""
        if self._is_open and self.blocks[-1]["type"] == block["type"]:
            return []
        return [*self.end(), self._begin(block)]

    def _begin(self, block: dict[str, Any]) -> BlockEvent:
        self.blocks.append(block)
        self._is_open = True
        return self._event("content_block_start", content_block=dict(block))

    def _delta(self, kind: str, field: str, text: str) -> BlockEvent:
        assert self._is_open, f"{kind} outside of a block: {text!r}"
        self._parts.append(text)
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _event(self, event: str, **fields: Any) -> BlockEvent:
        return event, {"index": len(self.blocks) - 1, **fields}


def _signed(signature: str) -> dict[str, str]:
    return {"type": "signature_delta", "signature": signature}


def _signature(thinking: str) -> str:
    """Return the signature of a thinking block.

    Clients require one and return it unread; this server does not verify it.
    """
    return b64encode(hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).digest()).decode()


def _tool_input(text: str) -> dict[str, Any]:
    """Decode the arguments of a call."""
    if not text.strip():
        return {}
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {INVALID_JSON: text}
