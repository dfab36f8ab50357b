"""Formatters, which convert the deltas of a generation to the bytes of a response."""

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
"""Comment in a stream, which clients skip."""


def named_event(name: str, value: object) -> bytes:
    """Encode a named server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def error_event(error: ApiError) -> bytes:
    """Encode an error that occurs after the status was sent.

    The result is an error event and the end of the stream.
    """
    return b"data: " + error.body() + b"\n\n" + DONE


class ResponseHead(msgspec.Struct, frozen=True):
    """First fields of every chunk and of a whole response, in JSON order."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def response_head(prefix: str, kind: str, model: ModelFacts) -> ResponseHead:
    """Build the first fields of a response, with a new id."""
    return ResponseHead(
        id=f"{prefix}-{secrets.token_hex(16)}",
        object=kind,
        created=int(time.time()),
        model=model.name,
        system_fingerprint=system_fingerprint(model.device, model.dtype, model.weight_format, model.kv_dtype),
    )


@cache
def system_fingerprint(device: str, *formats: str) -> str:
    """Name what the output depends on besides the request: version, device and formats.

    Cached, because every response has it. Duplicate and empty formats are skipped.
    """
    names = "-".join(filter(None, dict.fromkeys(formats)))
    return f"tandem-{distribution_version()}-{device}-{re.sub('[^a-z0-9_]+', '-', names).strip('-')}"


class UsageSoFar:
    """Count the tokens of each choice of a stream for `continuous_usage_stats`."""

    def __init__(self, admitted: Admitted) -> None:
        self._prompt_tokens = [len(admitted.prompt_of(index).ids) for index in range(admitted.num_choices)]
        self._tokens = [0] * admitted.num_choices

    def add(self, piece: ChoiceDelta) -> None:
        """Count the tokens of a delta."""
        self._tokens[piece.index] += len(piece.token_ids)

    def tail(self, index: int) -> bytes:
        """Return the end of a choice's chunk, with its usage so far."""
        prompt, completion = self._prompt_tokens[index], self._tokens[index]
        counts = (prompt, completion, prompt + completion)
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts


class Formatter(Protocol):
    """Formatter of a response. No I/O.

    A stream calls `opening`, then `batch` for each event loop iteration, then `closing` or `failure`; other responses
    call only `whole`.
    """

    keep_alive: bytes
    """Keep-alive of a silent stream."""

    def opening(self, usage: Usage) -> bytes:
        """Return the bytes before all deltas, sent together with the first.

        usage: has the cached tokens of the prompt, unless the stream starts before the engine's first event.
        """

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        """Encode deltas as events; empty if they have no visible output."""

    def closing(self, usage: Usage) -> bytes:
        """Return the end of a successful stream."""

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a failed stream."""

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        """Encode a response without streaming.

        choices: complete, in the order of their indices.
        """


class EventFormatter:
    """Formatter of the stream of events of one choice, from deltas of at most one token.

    A `token` event has the text that its token completes. It may be empty: after half of a character, or for a stop
    token. Held back text after the last token, which belongs to no single token, has a null id.
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
