"""The response of `POST /v1/responses`.

It is one response object, or the numbered events that build it.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.frontend.api.formatter import named_event
from tandem.frontend.api.responses.output_items import OutputItems, OutputStatus, StreamEvent
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Usage
from tandem.protocol.errors import FinishReason


class ResponsesFormatter:
    """Format one response of `/v1/responses`.

    `settings` are its fields that repeat the settings of the request.
    """

    def __init__(self, model: str, shape: MessageShape, settings: dict[str, Any]) -> None:
        self._parser = shape.new_parser()
        self._items = OutputItems()
        self._finish_reason = FinishReason.STOP.value
        self._number = 0
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._settings = settings

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._encoded([(f"response.{name}", {"response": response}) for name in ("created", "in_progress")])

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return self._encoded([event for piece in pieces for event in self._read(piece)])

    def closing(self, usage: Usage) -> bytes:
        ended = self._items.finish(self._ending)
        return self._encoded([*ended, self._last(self._ended(usage))])

    def failure(self, error: ApiError) -> bytes:
        ended = self._items.end("incomplete")
        fields = {"code": error.code, "message": error.message, "param": error.param}
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._response("failed", error={"code": code, "message": error.message})
        return self._encoded([*ended, ("error", fields), self._last(response)])

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        for piece in choices:
            self._read(piece)
        self._items.finish(self._ending)
        return msgspec.json.encode(self._ended(usage))

    def _read(self, piece: ChoiceDelta) -> list[StreamEvent]:
        if piece.finish_reason:
            self._finish_reason = piece.finish_reason
        return [event for delta in self._parser.push(piece) for event in self._items.write(delta)]

    @property
    def _ending(self) -> OutputStatus:
        return "incomplete" if self._finish_reason == FinishReason.LENGTH.value else "completed"

    def _ended(self, usage: Usage) -> dict[str, Any]:
        status = self._ending
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        completed_at = int(time.time()) if status == "completed" else None
        return self._response(status, completed_at=completed_at, incomplete_details=details, usage=self._usage(usage))

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": self._items.items,
            "usage": None,
            **fields,
            **self._settings,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            # The count is required; reasoning that no single token closes cannot be counted.
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens or 0},
            "total_tokens": usage.total_tokens,
        }

    def _last(self, response: dict[str, Any]) -> StreamEvent:
        return f"response.{response['status']}", {"response": response}

    def _encoded(self, events: Sequence[StreamEvent]) -> bytes:
        parts: list[bytes] = []
        for event, fields in events:
            parts.append(named_event(event, {"type": event, "sequence_number": self._number, **fields}))
            self._number += 1
        return b"".join(parts)
