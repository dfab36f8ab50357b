"""HTTP errors: status and body.

There is one exception, one body, and one table from engine error codes to statuses.
"""

from collections.abc import Mapping

import msgspec

from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure

RETRY_AFTER_SECONDS = 1
"""Seconds in `Retry-After` if a retry may help; clients of the OpenAI API sleep for as long."""

_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_VALUE: 400,
    ErrorCode.CONTEXT_LENGTH: 400,
    ErrorCode.KV_CAPACITY: 400,
    ErrorCode.INVALID_GRAMMAR: 400,
    ErrorCode.GRAMMAR_FAILED: 400,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.SESSION_BUSY: 409,
    ErrorCode.SESSIONS_OFF: 400,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.ENGINE_PAUSED: 503,
    ErrorCode.ENGINE_SLEEPING: 503,
    ErrorCode.WEIGHTS_CHANGED: 503,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
    ErrorCode.ENGINE_FAILED: 500,
    ErrorCode.MODEL_FAILED: 500,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.ADAPTER_FAILED: 500,
}
_PARAM = {
    ErrorCode.SESSION_BUSY: "session_id",
    ErrorCode.SESSIONS_OFF: "session_id",
    ErrorCode.MODEL_NOT_FOUND: "model",
}
"""Request field at fault, for the codes that imply one."""


def error_type(status: int) -> str:
    """Return OpenAI's error `type` for a status."""
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "overloaded_error"
    if status == 504:
        return "timeout_error"
    return "server_error" if status >= 500 else "invalid_request_error"


class ApiError(Exception):
    """Request failed with an error response of OpenAI's format.

    `param` is the field at fault, `other` a second field that conflicts with it; `code` is for programs and the message
    for people. In the message `{param}` and `{other}` are replaced by the quoted names of the fields, so that a route
    can rename them.
    """

    def __init__(
        self,
        status: int,
        template: str,
        param: str | None = None,
        code: str | None = None,
        other: str | None = None,
        retry_after: int = RETRY_AFTER_SECONDS,
    ) -> None:
        self.message = template.replace("{param}", f"{param!r}").replace("{other}", f"{other!r}")
        super().__init__(self.message)
        self.status = status
        self.template = template
        self.param = param
        self.code = code
        self.other = other
        self.retry_after = retry_after
        """Seconds in the header `Retry-After`, for the errors that have it."""
        self.refusal = ""
        """Load limit that the request exceeded, as a label of the metrics; "" for other errors."""

    def body(self) -> bytes:
        """Encode the body of the error response."""
        return error_body(self.status, self.message, self.param, self.code)

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Return this error with a route's names of its fields.

        A name also applies to nested fields, for example `response_format` to `response_format.json_schema`; the first
        one that applies is used.
        """
        param, other = (None if path is None else renamed(path, names) for path in (self.param, self.other))
        error = ApiError(self.status, self.template, param, self.code, other, self.retry_after)
        error.refusal = self.refusal
        return error


class PromptTooLongError(ApiError):
    """Prompt with more tokens than allowed.

    `tokens` is their number or a lower bound, `limit` the maximum.
    """

    def __init__(self, template: str, param: str, code: ErrorCode, tokens: int, limit: int) -> None:
        super().__init__(400, template, param, code.value)
        self.tokens = tokens
        self.limit = limit


def renamed(path: str, names: Mapping[str, str]) -> str:
    """Return the path of a field with a route's names, as in `ApiError.renamed`."""
    for name, new in names.items():
        if path == name or path.startswith(name + "."):
            return new + path.removeprefix(name)
    return path


def error_headers(status: int, retry_after: int = RETRY_AFTER_SECONDS, code: str | None = None) -> dict[str, str]:
    """Return the headers of every error response with this status and code.

    Of 409s only a busy session has `Retry-After`: a swap, a sleep or an update that was refused would be refused again.
    """
    if status in (429, 503) or code == ErrorCode.SESSION_BUSY.value:
        return {"retry-after": str(retry_after)}
    # The rest of a rejected body is not read, so the connection cannot be reused.
    return {"connection": "close"} if status == 413 else {}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Encode the JSON of an OpenAI error."""
    error: Mapping[str, str | None] = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def malformed(template: str, param: str | None = None) -> ApiError:
    """Return the 400 for a malformed body or field."""
    return ApiError(400, template, param, "invalid_request")


def unsupported(template: str, param: str, other: str | None = None) -> ApiError:
    """Return the 400 for an unsupported value of a well-formed field.

    The value is out of range, not supported, or conflicts with another field.
    """
    return ApiError(400, template, param, "invalid_value", other)


def unsupported_field(template: str, param: str) -> ApiError:
    """Return the 400 for a field that would change the output and is not supported."""
    return ApiError(400, template, param, "unsupported_parameter")


def overloaded(message: str, retry_after: int = RETRY_AFTER_SECONDS, refusal: str = "") -> ApiError:
    """Return the 429 for a request that exceeds a load limit.

    retry_after: seconds after which it may be accepted. refusal: name of the limit in the metrics.
    """
    error = ApiError(429, message, None, ErrorCode.OVERLOADED.value, None, retry_after)
    error.refusal = refusal
    return error


def unavailable(
    message: str, code: ErrorCode = ErrorCode.ENGINE_UNAVAILABLE, retry_after: int = RETRY_AFTER_SECONDS
) -> ApiError:
    """Return the 503 for a request that may succeed once the server is ready.

    retry_after: seconds until then.
    """
    return ApiError(503, message, None, code.value, None, retry_after)


def out_of_time(timeout: float) -> ApiError:
    """Return the 504 for a request that was not answered within `timeout` seconds."""
    message = (
        f"the request was not answered within {timeout:g} s (--request-timeout); ask for fewer tokens or try later"
    )
    return ApiError(504, message, None, "deadline_exceeded")


def from_failure(failure: Failure, retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    """Return the error of a request that failed in the engine, or with it."""
    status, param = _STATUS[failure.code], _PARAM.get(failure.code)
    return ApiError(status, failure.message, param, failure.code.value, None, failure.retry_after or retry_after)
