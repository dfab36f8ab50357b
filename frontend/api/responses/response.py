"""Format the response of `POST /v1/responses`, as one object or as numbered stream events."""

import secrets
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from tandem.frontend.api.formatter import KEEP_ALIVE, named_event
from tandem.frontend.api.responses.message_logprobs import MessageLogprobs
from tandem.frontend.api.responses.output_items import OutputItems, OutputStatus, StreamEvent
from tandem.frontend.api.responses.tools import ToolName
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.usage import Usage
from tandem.frontend.store.store import StoredItem, StoredResponse
from tandem.protocol.errors import FinishReason


class ResponsesFormatter:
    """Format one response of `/v1/responses`.

    `settings` are the fields that echo the request; `names` maps the tool names that the model writes to the client's.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        model: str,
        shape: MessageShape,
        settings: dict[str, Any],
        names: Mapping[str, ToolName] = MappingProxyType({}),
        carries_reasoning: bool = False,
    ) -> None:
        self.is_stored = False
        """Value of `store`: True if the response will be stored and, at the end, if it was."""
        self._parser = shape.new_parser()
        self._logprobs = MessageLogprobs()
        self._items = OutputItems(names, self._logprobs, carries_reasoning)
        self._last: dict[str, Any] = {}
        """Final response object."""
        self._finish_reason = FinishReason.STOP.value
        self._number = 0
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._settings = settings

    def opening(self, usage: Usage) -> bytes:
        response = self._response("in_progress")
        return self._encoded([(f"response.{name}", {"response": response}) for name in ("created", "in_progress")])

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return self._encoded([event for piece in pieces for event in self._read(piece)])

    def closing(self, usage: Usage) -> bytes:
        return self.end(usage) + self.last_event()

    def failure(self, error: ApiError) -> bytes:
        return self.fail(error) + self.last_event()

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        self.read(choices, usage)
        return self.encoded()

    def end(self, usage: Usage) -> bytes:
        """End the output and return its last events, without the event that ends the response."""
        ended = self._items.finish(self._ending)
        self._last = self._ended(usage)
        return self._encoded(ended)

    def fail(self, error: ApiError) -> bytes:
        """End the output with an error and return its last events, without the event that ends the response."""
        ended = self._items.end("incomplete")
        fields = {"code": error.code, "message": error.message, "param": error.param}
        codes = {429: "rate_limit_exceeded"}
        code = codes.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        self._last = self._response("failed", error={"code": code, "message": error.message})
        return self._encoded([*ended, ("error", fields)])

    def last_event(self) -> bytes:
        """Return the event that ends the response."""
        response = {**self._last, "store": self.is_stored}
        return self._encoded([(f"response.{response['status']}", {"response": response})])

    def read(self, choices: Sequence[ChoiceDelta], usage: Usage) -> None:
        """Process a complete output."""
        for piece in choices:
            self._read(piece)
        self.end(usage)

    def encoded(self) -> bytes:
        """Encode the final response object."""
        return msgspec.json.encode({**self._last, "store": self.is_stored})

    def stored_form(self, given: Sequence[StoredItem], previous: str | None) -> StoredResponse:
        """Return the finished response in its stored form.

        `given` is its input, `previous` the id of the response it continues, if any.
        """
        fields = {**self._last, "store": True, "output": []}
        output = tuple(StoredItem(item["id"], msgspec.json.encode(item)) for item in self._items.items)
        return StoredResponse(self._last["id"], msgspec.json.encode(fields), tuple(given), output, previous)

    def _read(self, piece: ChoiceDelta) -> list[StreamEvent]:
        self._logprobs.add(piece.logprobs)
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
            "store": self.is_stored,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            # The count is required, but unknown if no single token ends the reasoning.
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens or 0},
            "total_tokens": usage.total_tokens,
            **usage.version_fields,
        }

    def _encoded(self, events: Sequence[StreamEvent]) -> bytes:
        parts: list[bytes] = []
        for event, fields in events:
            parts.append(named_event(event, {"type": event, "sequence_number": self._number, **fields}))
            self._number += 1
        return b"".join(parts)
