"""What a reply is made of, whatever its shape: pieces in, bytes out."""

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import Piece
from tandem.frontend.generation.generation import Usage
from tandem.protocol.events import ModelFacts
from tandem.protocol.version import distribution_version

DONE = b"data: [DONE]\n\n"


def named_event(name: str, value: object) -> bytes:
    """An event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def error_event(error: ApiError) -> bytes:
    """How an error is told once the status has been sent: an event with the error body, and the end."""
    return b"data: " + error.body() + b"\n\n" + DONE


class ReplyHead(msgspec.Struct, frozen=True):
    """What every chunk of a reply, and the whole reply, begins with. Field order is the order on the wire."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def reply_head(prefix: str, kind: str, model: ModelFacts) -> ReplyHead:
    """The head of one reply, with a fresh id."""
    return ReplyHead(
        id=f"{prefix}-{secrets.token_hex(16)}",
        object=kind,
        created=int(time.time()),
        model=model.name,
        system_fingerprint=f"tandem-{distribution_version()}-{model.device}-{model.dtype}",
    )


class Formatter(Protocol):
    """The shape of one reply. Does no I/O; a stream calls `opening`, `batch` for each turn of the event loop, then
    `closing` or `failure`; a whole reply calls `whole` alone."""

    def opening(self) -> bytes:
        """What goes ahead of all pieces, in the same send as the first."""

    def batch(self, pieces: Sequence[Piece]) -> bytes:
        """The events of some pieces; empty where they have nothing to show."""

    def closing(self, usage: Usage) -> bytes:
        """What ends a stream that went well."""

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that did not."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The body of a reply that is not streamed; the pieces are whole choices in the order of their indices."""


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
