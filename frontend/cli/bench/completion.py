"""Streamed completion: its body, and the times and tokens of its response.

ITL is the gap between two chunks with output. If the server returns token ids (`return_token_ids`), a gap is divided by
the number of tokens in the chunk that ends it; otherwise it counts once. Tokens of the first chunk have no gap and
count for TTFT only. Chunks that arrive in one read share its time.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from tandem.frontend.cli.bench.connection import ConnectionPool
from tandem.frontend.cli.bench.record import Record
from tandem.frontend.cli.bench.sse import SseDecoder
from tandem.frontend.cli.bench.workloads import Request

DONE = b"[DONE]"


class RequestFailedError(Exception):
    """kind: category of the failure. detail: message of the server."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class Choice(Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(Struct):
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


@dataclass(frozen=True)
class Dialect:
    """Fields of every request body of a run.

    `ignore_eos`, `token_ids` and priorities are extensions that OpenAI's own API does not have.
    """

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    token_ids: bool = False
    top_p: float | None = None

    def body(self, request: Request) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.top_p is not None:
            body["top_p"] = self.top_p
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.token_ids:
            body["return_token_ids"] = True
        if request.priority:
            body["priority"] = request.priority
        return msgspec.json.encode(body)


class Meter:
    """Fill a record from the events of a response."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._previous = 0.0
        self._chunks = 0
        self._ids = 0
        self._usage: Usage | None = None
        self._ended = False

    def take(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self._ended = True
            return
        chunk = _decode(payload)
        if chunk.error is not None:
            raise RequestFailedError("error event", payload.decode(errors="replace")[:300])
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._choice(choice, now)

    def _choice(self, choice: Choice, now: float) -> None:
        record = self._record
        record.last = now
        self._ended = self._ended or choice.finish_reason is not None
        ids = len(choice.token_ids or ())
        if not (choice.text or ids) and choice.finish_reason is not None:
            return
        tokens = ids or 1
        self._chunks += 1
        self._ids += ids
        if record.first is None:
            record.first = now
        else:
            record.gaps.extend([(now - self._previous) / tokens] * tokens)
        self._previous = now

    def finish(self) -> None:
        """Count the tokens of a complete response.

        Raises RequestFailedError for an invalid one.
        """
        record = self._record
        if not self._ended:
            raise RequestFailedError("cut off", "the stream ended before its last chunk")
        if record.first is None:
            raise RequestFailedError("no output")
        if self._usage is not None:
            record.tokens, record.counted_by = self._usage.completion_tokens, "usage"
            record.prompt_tokens = self._usage.prompt_tokens
        elif self._ids:
            record.tokens, record.counted_by = self._ids, "token_ids"
        else:
            record.tokens, record.counted_by = self._chunks, "chunks"


async def complete(pool: ConnectionPool, body: bytes, record: Record) -> None:
    """Send a request and read its response to the end.

    Raises RequestFailedError, and the connection's errors.
    """
    endpoint = pool.endpoint_of(record.index)
    connection = await pool.post(endpoint, body)
    try:
        if connection.status != 200:
            body = await connection.read_all()
            raise RequestFailedError(f"HTTP {connection.status}", body.decode(errors="replace")[:300])
        events, meter = SseDecoder(), Meter(record)
        while (data := await connection.read()) is not None:
            now = time.monotonic()
            for payload in events.feed(data):
                meter.take(payload, now)
        meter.finish()
    finally:
        pool.release(endpoint, connection)
