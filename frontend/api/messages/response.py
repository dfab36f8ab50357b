"""The response of `POST /v1/messages`: one message, or the events that build it."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.frontend.api.formatter import named_event
from tandem.frontend.api.messages.blocks import BlockEvent, ContentBlocks
from tandem.frontend.api.messages.errors import anthropic_error, anthropic_status
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.usage import Usage
from tandem.protocol.errors import FinishReason

PING = named_event("ping", {"type": "ping"})
"""Keep-alive event."""

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}

_NO_DETAILS = {"stop_details": None, "container": None}
"""Properties of a message that are required by Anthropic's schema but have no value here."""
_NO_USAGE = {"cache_creation": None, "inference_geo": None, "service_tier": None}
"""The same for the usage of a whole message, and of the event that starts one."""


class MessagesFormatter:
    """Format a response of `/v1/messages`.

    request_id: included in the error that ends a stream.
    """

    keep_alive = PING

    def __init__(self, admitted: Admitted, shape: MessageShape, hide_thinking: bool, request_id: str) -> None:
        self._parser = shape.new_parser()
        self._blocks = ContentBlocks(hide_thinking)
        self._request_id = request_id
        self._is_lowered = admitted.prompt_of(0).max_tokens < admitted.options.max_tokens
        """True if `max_tokens` exceeds the remaining context."""
        self._ending: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None, **_NO_DETAILS}
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": admitted.model.name,
        }

    def opening(self, usage: Usage) -> bytes:
        counts = {**_usage(usage), "output_tokens": 0, "output_tokens_details": None, **_NO_USAGE}
        message: dict[str, Any] = {**self._head, "content": [], **self._ending, "usage": counts}
        return _encoded([("message_start", {"message": message})])

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return _encoded([event for piece in pieces for event in self._read(piece)])

    def closing(self, usage: Usage) -> bytes:
        last = ("message_delta", {"delta": self._ending, "usage": self._usage(usage)})
        return _encoded([*self._blocks.end(), last, ("message_stop", {})])

    def failure(self, error: ApiError) -> bytes:
        status = anthropic_status(error.status, error.code)
        return b"event: error\ndata: " + anthropic_error(status, error.message, self._request_id) + b"\n\n"

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        for piece in choices:
            self._read(piece)
        self._blocks.end()
        counts = {**self._usage(usage), **_NO_USAGE}
        return msgspec.json.encode({**self._head, "content": self._blocks.blocks, **self._ending, "usage": counts})

    def _read(self, piece: ChoiceDelta) -> list[BlockEvent]:
        events = [event for delta in self._parser.push(piece) for event in self._blocks.write(delta)]
        if piece.finish_reason is not None:
            self._ending |= {"stop_reason": self._stop_reason(piece), "stop_sequence": piece.stop_string}
        return events

    def _stop_reason(self, piece: ChoiceDelta) -> str:
        if piece.stop_string is not None:
            return "stop_sequence"
        if piece.finish_reason == FinishReason.LENGTH.value:
            return "model_context_window_exceeded" if self._is_lowered else "max_tokens"
        return _STOP_REASONS[self._parser.finish_reason(piece.finish_reason or "stop")]

    def _usage(self, usage: Usage) -> dict[str, Any]:
        thinking = self._parser.reasoning_tokens
        details = None if thinking is None else {"thinking_tokens": thinking}
        return {
            **_usage(usage),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": details,
            **usage.version_fields,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    """Count the tokens of a prompt as Anthropic does.

    Cached tokens are not part of `input_tokens`.
    """
    cached_tokens = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "server_tool_use": None,
    }


def _encoded(events: Sequence[BlockEvent]) -> bytes:
    return b"".join([named_event(event, {"type": event, **fields}) for event, fields in events])
