"""Reading a request's body: up to a limit, and no more of all bodies together than the process can hold."""

import asyncio
import contextlib
from types import TracebackType

from starlette.requests import Request

from frontend.errors import ApiError, malformed, unavailable
from protocol.errors import ErrorCode

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
    415 for a compressed one."""
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
        part, more = await _next(request)
        size += len(part)
        if size > limit:
            parts.clear()
            raise await _too_large(request, limit, more)
        share.grow(size)
        parts.append(part)
    return b"".join(parts)


async def _next(request: Request) -> tuple[bytes, bool]:
    """The next part of the body, and whether another follows."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise malformed("the client went away before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


async def _too_large(request: Request, limit: int, more: bool) -> ApiError:
    """The error to raise, once the client has sent the rest of it or more than anybody waits for."""
    if more:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await _drain(request)
    return ApiError(413, f"the body exceeds {limit} bytes; send less at once", None, "request_too_large")


async def _drain(request: Request) -> None:
    size, more = 0, True
    while more and size <= DRAIN_BYTES:
        part, more = await _next(request)
        size += len(part)
