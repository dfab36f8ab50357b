"""What goes wrong over HTTP: one exception, one body, one table from the engine's codes to statuses."""

from collections.abc import Mapping

import msgspec

from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure

RETRY_AFTER_SECONDS = 1
"""Sent where to try again may help: clients of the OpenAI API sleep this long before they do."""

_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_VALUE: 422,
    ErrorCode.CONTEXT_LENGTH: 400,
    ErrorCode.KV_CAPACITY: 400,
    ErrorCode.INVALID_GRAMMAR: 400,
    ErrorCode.GRAMMAR_FAILED: 400,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.SESSION_BUSY: 409,
    ErrorCode.SESSIONS_OFF: 422,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
    ErrorCode.ENGINE_FAILED: 500,
}
_PARAM = {ErrorCode.SESSION_BUSY: "session_id", ErrorCode.SESSIONS_OFF: "session_id"}
"""The field at fault, where a code tells it."""


def error_type(status: int) -> str:
    """OpenAI's `type` of an error of this status."""
    if status == 404:
        return "not_found_error"
    if status == 503:
        return "overloaded_error"
    return "server_error" if status >= 500 else "invalid_request_error"


class ApiError(Exception):
    """A request that ends in an error of the OpenAI shape.

    `param` names the field at fault; `code` is for programs, the message for people.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        return error_body(self.status, self.message, self.param, self.code)


def error_headers(status: int) -> dict[str, str]:
    """Headers every error response of this status carries."""
    if status in (409, 503):
        return {"retry-after": str(RETRY_AFTER_SECONDS)}
    # What is left of a refused body is not read, so the connection cannot be used again.
    return {"connection": "close"} if status == 413 else {}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an OpenAI error."""
    error: Mapping[str, str | None] = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def malformed(message: str, param: str | None = None) -> ApiError:
    """400: what was sent is not what this field or body can be at all."""
    return ApiError(400, message, param, "invalid_request")


def unsupported(message: str, param: str) -> ApiError:
    """422: well-formed, but out of range or not supported; `param` names the field."""
    return ApiError(422, message, param, "invalid_value")


def unavailable(message: str, code: ErrorCode = ErrorCode.ENGINE_UNAVAILABLE) -> ApiError:
    """503: nothing is wrong with the request, try again."""
    return ApiError(503, message, None, code.value)


def from_failure(failure: Failure) -> ApiError:
    """The HTTP face of a request that the engine, or the loss of it, ended."""
    return ApiError(_STATUS[failure.code], failure.message, _PARAM.get(failure.code), failure.code.value)
