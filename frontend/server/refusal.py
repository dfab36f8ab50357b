"""Refusals of requests by the transport, before they reach the app."""

from collections.abc import Iterable

from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tandem.frontend.errors import error_body, error_headers
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server.connections import Closed
from tandem.frontend.server.middleware import REQUEST_ID, fresh_id
from tandem.protocol.errors import ErrorCode


class Refusal(Struct, frozen=True):
    """Refusal of a request, with the status, code and text of the answer."""

    reason: Closed
    status: int
    code: str
    message: str

    def response(self, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Encode the answer, after which the connection is closed."""
        body = error_body(self.status, self.message, None, self.code)
        headers = [
            *default_headers,
            (REQUEST_ID, fresh_id()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *((name.encode(), value.encode()) for name, value in error_headers(self.status).items()),
            (b"connection", b"close"),
        ]
        return b"".join([STATUS_LINE[self.status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body])


def malformed(message: str = "Invalid HTTP request received.") -> Refusal:
    """Return the refusal of what is not valid HTTP."""
    return Refusal(Closed.MALFORMED, 400, "invalid_http", message)


def headers_too_large(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of headers with too many bytes."""
    message = f"the request's headers exceed {limits.max_headers_size} bytes; send fewer or shorter ones"
    return Refusal(Closed.HEADERS_TOO_LARGE, 431, "headers_too_large", message)


def too_many_headers(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of too many headers."""
    message = f"the request has more than {limits.max_headers} headers; send fewer"
    return Refusal(Closed.TOO_MANY_HEADERS, 431, "too_many_headers", message)


def url_too_long(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of a URL that is too long."""
    message = f"the request's URL exceeds {limits.max_url} bytes; send the data in the body"
    return Refusal(Closed.URL_TOO_LONG, 414, "url_too_long", message)


def too_many_pipelined(limit: int) -> Refusal:
    """Return the refusal of too many requests without waiting for answers."""
    message = f"more than {limit} requests of this connection wait for an answer; wait for answers before sending more"
    return Refusal(Closed.TOO_MANY_PIPELINED, 400, "too_many_pipelined", message)


def header_timeout(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of headers that take too long."""
    message = f"the request's headers did not arrive within {limits.header_timeout:g} s; send them faster"
    return Refusal(Closed.HEADER_TIMEOUT, 408, "request_timeout", message)


def body_timeout(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of a body that takes too long."""
    rate = f"{limits.body_timeout:g} s and 1 s for each {limits.body_rate} bytes received"
    return Refusal(
        Closed.BODY_TIMEOUT, 408, "request_timeout", f"the body did not arrive within {rate}; send it faster"
    )


def too_busy(limit: int) -> Refusal:
    """Return the refusal of a request beyond the connections that may have one."""
    message = f"{limit} connections have a request, which is the most that the server takes; try again later"
    return Refusal(Closed.BUSY, 503, ErrorCode.OVERLOADED.value, message)
