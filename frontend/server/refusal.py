"""Responses to requests that the transport refuses before they reach the app."""

from collections.abc import Iterable, Mapping

from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tandem.frontend.api.error_response import error_answer
from tandem.frontend.api.request_scope import REQUEST_ID_KEY, fresh_id, request_id_headers
from tandem.frontend.errors import ApiError
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server.connections import Closed
from tandem.protocol.errors import ErrorCode


class Refusal(Struct, frozen=True):
    """Refusal of a request: status, code and message."""

    reason: Closed
    status: int
    code: str
    message: str

    def response(
        self, default_headers: Iterable[tuple[bytes, bytes]], scope: Mapping[str, object] | None, url: bytes = b""
    ) -> bytes:
        """Encode the response, which closes the connection.

        It has the format of the request's API, as far as `scope` is known. Before the end of the headers the scope has
        no path, and `url` is used.
        """
        request_id = fresh_id()
        path = url.partition(b"?")[0].decode("latin-1")
        known = {"path": path, **(scope or {}), REQUEST_ID_KEY: request_id.decode()}
        answer = error_answer(known, ApiError(self.status, self.message, None, self.code))
        headers = [
            *default_headers,
            *((name, request_id) for name in request_id_headers(known)),
            *answer.raw_headers,
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        return b"".join([STATUS_LINE[answer.status_code], *lines, b"\r\n", bytes(answer.body)])


def malformed(message: str = "Invalid HTTP request received.") -> Refusal:
    """Return the refusal of invalid HTTP."""
    return Refusal(Closed.MALFORMED, 400, "invalid_http", message)


def headers_too_large(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of headers that are too large."""
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
    """Return the refusal of too many pipelined requests."""
    message = f"more than {limit} requests of this connection wait for an answer; wait for answers before sending more"
    return Refusal(Closed.TOO_MANY_PIPELINED, 400, "too_many_pipelined", message)


def header_timeout(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of headers that arrive too slowly."""
    message = f"the request's headers did not arrive within {limits.header_timeout:g} s; send them faster"
    return Refusal(Closed.HEADER_TIMEOUT, 408, "request_timeout", message)


def body_timeout(limits: ConnectionLimits) -> Refusal:
    """Return the refusal of a body that arrives too slowly."""
    rate = f"{limits.body_timeout:g} s and 1 s for each {limits.body_rate} bytes received"
    return Refusal(
        Closed.BODY_TIMEOUT, 408, "request_timeout", f"the body did not arrive within {rate}; send it faster"
    )


def too_busy(limit: int) -> Refusal:
    """Return the refusal of a request when too many connections are busy."""
    message = f"{limit} connections have a request, which is the most that the server takes; try again later"
    return Refusal(Closed.BUSY, 503, ErrorCode.OVERLOADED.value, message)
