"""Read request bodies within limits.

Each body has a limit of its own and counts against a common budget until its request is admitted.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from types import TracebackType
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from tandem.frontend.api.byte_budget import MAX_INLINE_BODY, ByteBudget, Reservation
from tandem.frontend.api.owner import owner_of
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.errors import ApiError, malformed, unavailable
from tandem.frontend.generation.stage import Stage
from tandem.frontend.workers import Workers
from tandem.protocol.errors import ErrorCode

_Parsed = TypeVar("_Parsed")

_JSON = b"application/json"
"""Usual content type, and the default for a body without one."""


class PendingRequests:
    """Requests of a process between their first byte and their admission.

    `len` counts them.

    """

    def __init__(self, max_body: int, parser: Workers, budget: ByteBudget) -> None:
        """Initialize limits and the parsing thread.

        max_body: maximum bytes of a body. parser: thread that parses large bodies. budget: memory budget shared by
        large bodies.
        """
        self._max_body = max_body
        self._parser = parser
        self._budget = budget
        self._open: set[PendingRequest] = set()

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def receive(self, request: Request, parse: Callable[[bytes], _Parsed]) -> AsyncIterator[_Parsed]:
        """Read and parse one body.

        The request counts as pending until the `with` block ends. Only large bodies are parsed in a thread, which would
        cost more than it saves for small ones. Raises ApiError as `read_body` and `hold` do, and exceptions of `parse`.
        """
        with self.hold(owner_of(request.scope)) as reservation:
            begun = monotonic()
            body = await read_body(request, self._max_body, reservation)
            parsed = parse(body) if len(body) <= MAX_INLINE_BODY else await self._parser.run(parse, body)
            request_record(request.scope).stages.append(Stage("parse", begun, monotonic()))
            yield parsed

    def hold(self, owner: str = "") -> "PendingRequest":
        """Count one request of an owner as pending within a `with` block.

        The block gets its body reservation. Raises ApiError 503 within the block when `end_all` is called.
        """
        return PendingRequest(self._open, self._budget.reservation(owner))

    def end_all(self) -> None:
        """Fail every pending request, whatever it is waiting for."""
        for request in self._open:
            request.end()


class PendingRequest:
    """Context manager that counts one request as pending."""

    def __init__(self, pending: "set[PendingRequest]", reservation: Reservation) -> None:
        self._pending = pending
        self._reservation = reservation
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        """Requests to cancel the task that came before."""
        self._has_ended = False

    def end(self) -> None:
        """Fail the request."""
        if self._task is not None and not self._has_ended:
            self._has_ended = True
            self._task.cancel()

    def __enter__(self) -> Reservation:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancels = self._task.cancelling()
        self._pending.add(self)
        return self._reservation.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pending.discard(self)
        self._reservation.__exit__(kind, error, trace)
        if not self._has_ended or self._task is None:
            return
        if self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN) from None


async def read_body(request: Request, max_body: int, reservation: Reservation) -> bytes:
    """Read the whole body.

    Raises ApiError 413 for more than `max_body` bytes, announced or not, 429 if the budget is exhausted, and 415 for
    a compressed body or one that is not JSON.
    """
    headers = dict(reversed(request.scope["headers"]))  # the first one of repeated headers
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    if encoding not in ("", "identity"):
        message = f"a body with content-encoding {encoding[:40]!r} is not supported; send it uncompressed"
        raise ApiError(415, message, None, "unsupported_content_encoding")
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_body:
        raise _too_large(max_body)
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        chunk, more = await _next_chunk(request.receive)
        size += len(chunk)
        if size > max_body:
            raise _too_large(max_body)
        reservation.grow(size)
        chunks.append(chunk)
    if (content_type := headers.get(b"content-type", _JSON)) != _JSON:
        _check_content_type(content_type.decode("latin-1"))
    return b"".join(chunks)


def _check_content_type(content_type: str) -> None:
    """Raise ApiError 415 for a body declared as anything but JSON in UTF-8.

    A page of another origin can send such a body without a CORS preflight.
    """
    kind, _, parameters = content_type.lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]*)", parameters)
    is_json = kind.strip() == "application/json" or (kind.startswith("application/") and kind.strip().endswith("+json"))
    if not is_json or (charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        message = f"a body of content-type {content_type[:80]!r} is not supported; send JSON as 'application/json'"
        raise ApiError(415, message, None, "unsupported_content_type")


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    """Return the next chunk of the body, and whether more follow.

    Raises ApiError 400 if the client disconnected.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise malformed("the client disconnected before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


def _too_large(max_body: int) -> ApiError:
    return ApiError(413, f"the body exceeds {max_body} bytes; send a smaller one", None, "request_too_large")
