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
