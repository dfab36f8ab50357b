"""Reading a request's body: up to a limit, and no more of all bodies together than the process can hold."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from starlette.requests import Request
from starlette.types import Receive

from tandem.frontend.errors import ApiError, malformed, unavailable
from tandem.protocol.errors import ErrorCode

SMALL_BODY = 64 * 1024
"""Bodies up to this size are read and parsed in place, and are not counted."""

MAX_HELD = 256 * 2**20
"""Bytes of larger bodies that are read, parsed and admitted at once."""

DRAIN_BYTES = 64 * 2**20
DRAIN_SECONDS = 10.0
"""What is still read, and thrown away, of a body that is too large: many clients look at no answer before all of
theirs has left, and a connection closed on unread bytes would take the answer away from them."""


class BodyBudget:
    """The bytes of large bodies that one process holds."""

    def __init__(self, most: int = MAX_HELD) -> None:
        self.most = most
        self.held = 0

    def share(self) -> "BodyShare":
        return BodyShare(self)


class BodyShare:
    """One request's part of a budget, given back at the end of its `with`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def grow(self, size: int) -> None:
        """Counts a body that has come to `size` bytes. Raises ApiError 503 where the budget has no room for it."""
        if size <= SMALL_BODY:
            return
        more = size - self._held
        if self._budget.held + more > self._budget.most:
            raise unavailable(
                f"large bodies of {self._budget.held} bytes are being read, at most {self._budget.most}; "
                "try again later",
                ErrorCode.OVERLOADED,
            )
        self._budget.held += more
        self._held = size

    def __enter__(self) -> "BodyShare":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.held -= self._held
        self._held = 0


async def read_body(request: Request, limit: int, share: BodyShare) -> bytes:
    """The whole body. Raises ApiError 413 for more than `limit` bytes, announced or not, 503 beyond the budget and
    415 for a compressed one and for what is not JSON."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"a body in content-encoding {encoding[:40]!r} is not supported; send it as it is"
        raise ApiError(415, message, None, "unsupported_content_encoding")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        # A client that expects leave to go on has sent nothing yet.
        raise await _too_large(request, limit, request.headers.get("expect", "").lower() != "100-continue")
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        part, more = await _next(request.receive)
        size += len(part)
        if size > limit:
            parts.clear()
            raise await _too_large(request, limit, more)
        share.grow(size)
        parts.append(part)
    _check_type(request.headers.get("content-type"))
    return b"".join(parts)


def _check_type(content_type: str | None) -> None:
    """Raises ApiError 415 for a body that says to be something else than JSON in UTF-8. A page of another origin can
    send such a body without asking first."""
    if content_type is None:
        return
    kind, _, parameters = content_type.lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]*)", parameters)
    is_json = kind.strip() == "application/json" or (kind.startswith("application/") and kind.strip().endswith("+json"))
    if not is_json or (charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        message = f"a body of content-type {content_type[:80]!r} is not supported; send JSON as 'application/json'"
        raise ApiError(415, message, None, "unsupported_content_type")


async def _next(receive: Receive) -> tuple[bytes, bool]:
    """The next part of the body, and whether another follows. Raises ApiError 400 where the client is gone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise malformed("the client went away before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


async def _too_large(request: Request, limit: int, more: bool) -> ApiError:
    """The error to raise, once the client has sent the rest of it or more than anybody waits for."""
    if more:
        await drain(request.receive)
    return ApiError(413, f"the body exceeds {limit} bytes; send less at once", None, "request_too_large")


async def drain(receive: Receive) -> None:
    """Reads the rest of a body, as far as anybody waits for it, and throws it away."""
    size, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while more and size <= DRAIN_BYTES:
                part, more = await _next(receive)
                size += len(part)


class Arrivals:
    """All requests of one process between their first byte and the engine. `len` is how many there are."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self._open: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[BodyShare]:
        """Holds one request and its share of the bodies. Raises ApiError 503 within it where `end_all` is called."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open.add(limit)
                with self._bodies.share() as share:
                    yield share
        except TimeoutError:
            if not limit.expired():
                raise
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN) from None
        finally:
            self._open.discard(limit)

    def end_all(self) -> None:
        """Ends what they wait for."""
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            limit.reschedule(now)
