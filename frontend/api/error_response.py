"""Responses to requests that fail before their response has started.

They have the format of the request's API.
"""

from starlette.responses import Response
from starlette.types import Scope

from tandem.frontend.api.messages.errors import anthropic_error, anthropic_status
from tandem.frontend.api.request_scope import ERROR_KEY, request_id, request_record, speaks_anthropic
from tandem.frontend.errors import ApiError, error_headers


def error_answer(scope: Scope, error: ApiError) -> Response:
    """Build an error response, and store its message for the log."""
    scope[ERROR_KEY] = error.message
    record = request_record(scope)
    record.error, record.refusal = error.code or "error", error.refusal
    headers = error_headers(error.status, error.retry_after, error.code)
    if not speaks_anthropic(scope):
        return Response(error.body(), error.status, headers, "application/json")
    status = anthropic_status(error.status, error.code)
    return Response(anthropic_error(status, error.message, request_id(scope)), status, headers, "application/json")
