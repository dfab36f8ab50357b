"""Answers of the transport to requests that never reach the app."""

import json

import pytest

from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server import refusal
from tandem.frontend.server.refusal import Refusal

LIMITS = ConnectionLimits()
DEFAULTS = [(b"date", b"today")]


def read(answer: bytes) -> tuple[int, dict[str, str], dict[str, object]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines), "a header is sent twice"
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    ("refused", "status", "anthropic_status", "kind"),
    [
        (refusal.malformed(), 400, 400, "invalid_request_error"),
        (refusal.headers_too_large(LIMITS), 431, 431, "invalid_request_error"),
        (refusal.url_too_long(LIMITS), 414, 414, "invalid_request_error"),
        (refusal.body_timeout(LIMITS), 408, 408, "invalid_request_error"),
        (refusal.too_busy(3), 503, 529, "overloaded_error"),
    ],
    ids=lambda value: value.code if isinstance(value, Refusal) else "",
)
def test_refusal_has_the_shape_of_the_api_that_the_request_uses(
    refused: Refusal, status: int, anthropic_status: int, kind: str
) -> None:
    for scope, url in (
        (None, b""),
        ({}, b"/v1/messagesX"),
        ({"path": "/v1/chat/completions", "headers": []}, b"/v1/messages"),
    ):
        found, headers, body = read(refused.response(DEFAULTS, scope, url))
        assert (found, headers["connection"], headers["date"]) == (status, "close", "today")
        assert (set(body), "request-id" in headers) == ({"error"}, False)
        assert headers["x-request-id"].startswith("req_")
    for scope, url in (
        ({"path": "/v1/messages", "headers": []}, b""),
        ({"headers": [(b"anthropic-version", b"2023-06-01")]}, b""),
        ({"headers": []}, b"/v1/messages/count_tokens?beta=true"),
    ):
        found, headers, body = read(refused.response(DEFAULTS, scope, url))
        assert (found, headers["connection"]) == (anthropic_status, "close")
        assert body["error"] == {"type": kind, "message": refused.message}
        assert body["request_id"] == headers["request-id"] == headers["x-request-id"]
        assert ("retry-after" in headers) == (status == 503)
