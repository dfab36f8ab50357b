"""Reading a request's body up to a limit."""

from starlette.requests import ClientDisconnect, Request

from frontend.errors import ApiError, malformed


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it exceeds `limit` bytes, whether or not it announced it."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise malformed("the client went away before its request was complete") from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds {limit} bytes; send less at once", None, "request_too_large")
