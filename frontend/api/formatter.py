"""Formatters, which turn the pieces of a generation into the bytes of a response."""

import re
import secrets
import time
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import msgspec

from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.usage import Usage
from tandem.protocol.events import ModelFacts
from tandem.protocol.version import distribution_version

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""Comment of a stream, which clients skip."""


def named_event(name: str, value: object) -> bytes:
    """Encode a named server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def error_event(error: ApiError) -> bytes:
    """Encode an error that occurs after the status was sent.

    The result is an event with the error body, and the end of the stream.
    """
    return b"data: " + error.body() + b"\n\n" + DONE


class ResponseHead(msgspec.Struct, frozen=True):
    """The first fields of every chunk and of a whole response, in JSON order."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def response_head(prefix: str, kind: str, model: ModelFacts) -> ResponseHead:
    """Build the head of one response, with a new id."""
    return ResponseHead(
        id=f"{prefix}-{secrets.token_hex(16)}",
        object=kind,
        created=int(time.time()),
        model=model.name,
        system_fingerprint=system_fingerprint(model.device, model.dtype, model.weight_format, model.kv_dtype),
    )


@cache
def system_fingerprint(device: str, *formats: str) -> str:
    """Name what output depends on beside the request: version, device and formats.

    Cached, because every response has it. formats: each is named once, and an empty one not at all.
    """
    names = "-".join(filter(None, dict.fromkeys(formats)))
    return f"tandem-{distribution_version()}-{device}-{re.sub('[^a-z0-9_]+', '-', names).strip('-')}"


class UsageSoFar:
    """Count the tokens of each choice of a stream for `continuous_usage_stats`."""

    def __init__(self, admitted: Admitted) -> None:
        self._prompt_tokens = [len(admitted.prompt_of(index).ids) for index in range(admitted.num_choices)]
        self._tokens = [0] * admitted.num_choices

    def add(self, piece: ChoiceDelta) -> None:
        """Count the tokens of a piece."""
        self._tokens[piece.index] += len(piece.token_ids)

    def tail(self, index: int) -> bytes:
        """Return the end of a chunk of a choice, with the usage of the choice so far."""
        prompt, completion = self._prompt_tokens[index], self._tokens[index]
        counts = (prompt, completion, prompt + completion)
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts


class Formatter(Protocol):
    """The format of one response, without I/O.

    A stream calls `opening`, then `batch` for each turn of the event loop, then `closing` or `failure`; a response
    that is not streamed calls only `whole`.
    """

    keep_alive: bytes
    """Sign of life of a stream that has nothing to send."""

    def opening(self, usage: Usage) -> bytes:
        """Return the bytes ahead of all pieces, sent together with the first.

        `usage` has the cached tokens of the prompt, unless a stream begins before the engine's first event.
        """

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        """Encode pieces as events; empty if they have no visible output."""

    def closing(self, usage: Usage) -> bytes:
        """Return the end of a stream that succeeded."""

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        """Encode a response that is not streamed.

        `choices` are whole and in the order of their indices.
        """


class EventFormatter:
    """Format the stream of events of one choice, from pieces of at most one token.

    A `token` event has the text that its token completes. It may be empty: after the first half of a character, or
    for the id that ends an output. Text held back beyond the last token, which belongs to no single token, has a
    null id.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, model: ModelFacts) -> None:
        self._head = response_head("evt", "events", model)
        self._finish_reason: str | None = None

    def opening(self, usage: Usage) -> bytes:
        return b""

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([self._piece(piece) for piece in pieces])

    def closing(self, usage: Usage) -> bytes:
        shown = msgspec.structs.asdict(self._head)
        return named_event("done", {**shown, "finish_reason": self._finish_reason, "usage": usage})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body() + b"\n\n"

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        raise AssertionError(f"a response in events is always streamed, got {len(choices)} whole choices of {usage}")

    def _piece(self, piece: ChoiceDelta) -> bytes:
        self._finish_reason = piece.finish_reason
        if not (piece.text or piece.token_ids):
            return b""
        token_id = piece.token_ids[0] if piece.token_ids else None
        return named_event("token", {"text": piece.text, "token_id": token_id})
