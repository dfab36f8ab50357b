"""Ids of requests, and the headers that carry them."""

import re
import secrets

from starlette.types import Scope

from tandem.frontend.api.request_scope import speaks_anthropic

REQUEST_ID = b"x-request-id"
ANTHROPIC_REQUEST_ID = b"request-id"
_SANE_ID = re.compile(rb"[\x20-\x7e]{1,128}")


def choose_request_id(scope: Scope) -> bytes:
    """Return the request id that the client sent, or a new one.

    The client's id is used only if it is safe in headers and logs.
    """
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _SANE_ID.fullmatch(value):
            return bytes(value)
    return fresh_id()


def request_id_headers(scope: Scope) -> tuple[bytes, ...]:
    """Return the names of the headers that tell a client the id of its request."""
    return (REQUEST_ID, ANTHROPIC_REQUEST_ID) if speaks_anthropic(scope) else (REQUEST_ID,)


def fresh_id() -> bytes:
    """Create a random request id."""
    return b"req_" + secrets.token_hex(16).encode()
