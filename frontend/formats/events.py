"""The stream of `"stream_format": "events"`: an event for each token, then exactly one `done` or `error`."""

from collections.abc import Sequence

import msgspec

from tandem.frontend.api.formatter import reply_head
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import Piece
from tandem.frontend.generation.generation import Usage
from tandem.frontend.sse import named_event
from tandem.protocol.events import ModelFacts


class EventFormat:
    """Formats one reply of one choice, from pieces of at most one token.

    A `token` event has the text that its token completes, which may be none, as that of half a character or of the
    id that ends an output. What was held back beyond the last token, and belongs to none alone, comes with a null id.
    """

    def __init__(self, model: ModelFacts) -> None:
        self._head = reply_head("evt", "events", model)
        self._finish_reason: str | None = None

    def opening(self) -> bytes:
        return b""

    def batch(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join([self._piece(piece) for piece in pieces])

    def closing(self, usage: Usage) -> bytes:
        shown = msgspec.structs.asdict(self._head)
        return named_event("done", {**shown, "finish_reason": self._finish_reason, "usage": usage})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body() + b"\n\n"

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        raise AssertionError(f"a reply in events is a stream, not {len(choices)} whole choices of {usage}")

    def _piece(self, piece: Piece) -> bytes:
        self._finish_reason = piece.finish_reason
        if not (piece.text or piece.token_ids):
            return b""
        token_id = piece.token_ids[0] if piece.token_ids else None
        return named_event("token", {"text": piece.text, "token_id": token_id})
