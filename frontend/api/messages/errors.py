"""Errors in the format of Anthropic's API."""

import msgspec

from tandem.protocol.errors import ErrorCode

OVERLOADED = 529
"""Status of a request that may succeed if it is retried."""

_STATUSES = {415: 400, 503: OVERLOADED}
"""Anthropic's status for statuses that its API does not use."""
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 504: "timeout_error", OVERLOADED: "overloaded_error",
}  # fmt: skip


def anthropic_status(status: int, code: str | None) -> int:
    """Return Anthropic's status for an error of this server."""
    return OVERLOADED if code == ErrorCode.OVERLOADED.value else _STATUSES.get(status, status)


def anthropic_error(status: int, message: str, request_id: str) -> bytes:
    """Encode the JSON of an error with a status of Anthropic's API."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})
