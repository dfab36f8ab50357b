"""Id, record and API of a request, from its ASGI scope."""

import re
import secrets
from time import monotonic
from typing import cast

from starlette.types import Scope

from tandem.frontend.generation.request_record import RequestRecord

REQUEST_ID_KEY = "tandem.request_id"
"""Key of the ASGI scope that holds the request id."""
RECORD_KEY = "tandem.record"
"""Key of the ASGI scope that holds the `RequestRecord`."""
ERROR_KEY = "tandem.error"
"""Key of the ASGI scope that holds the message of an error response, for the log."""
PEER_KEY = "tandem.peer"
"""Key of the ASGI scope that holds the address of the connection, which may be that of a proxy; None for a Unix
socket. Without it, the client is the peer."""
ANTHROPIC_PREFIX = "/v1/messages"
ANTHROPIC_VERSION = b"anthropic-version"
"""Header that every client of Anthropic's API sends."""
REQUEST_ID = b"x-request-id"
ANTHROPIC_REQUEST_ID = b"request-id"
_SANE_ID = re.compile(rb"[\x20-\x7e]{1,128}")


def request_id(scope: Scope) -> str:
    """Return the id of a request, which the outermost middleware has set."""
    return str(scope.get(REQUEST_ID_KEY, ""))


def request_record(scope: Scope) -> RequestRecord:
    """Return the record of a request, which the outermost middleware has begun."""
    record = scope.get(RECORD_KEY)
    if record is None:
        record = scope[RECORD_KEY] = RequestRecord(monotonic(), request_id(scope))
    return cast(RequestRecord, record)


def speaks_anthropic(scope: Scope) -> bool:
    """Return True if a request expects the format of Anthropic's API.

    This is the case for paths of that API only, and with the header `anthropic-version`.
    """
    path: str = scope.get("path", "")
    if path == ANTHROPIC_PREFIX or path.startswith(ANTHROPIC_PREFIX + "/"):
        return True
    return any(name == ANTHROPIC_VERSION for name, _ in scope.get("headers", ()))


def choose_request_id(scope: Scope) -> bytes:
    """Return the request id that the client sent, or a new one.

    The client's id is used only if it is safe in headers and logs.
    """
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _SANE_ID.fullmatch(value):
            return bytes(value)
    return fresh_id()


def request_id_headers(scope: Scope) -> tuple[bytes, ...]:
    """Return the names of the response headers with the request id."""
    return (REQUEST_ID, ANTHROPIC_REQUEST_ID) if speaks_anthropic(scope) else (REQUEST_ID,)


def fresh_id() -> bytes:
    """Create a random request id."""
    return b"req_" + secrets.token_hex(16).encode()
