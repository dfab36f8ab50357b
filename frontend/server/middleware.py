"""The outermost ASGI layer: every request has an id and is counted, every failure is logged with it."""

import logging
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.frontend.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[\x20-\x7e]{1,128}")

_ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"),
    *("/health/live", "/health/ready", "/metrics", "/version", "/openapi.json", "/", "/admin/scheduler"),
)
_NAMED = {"/v1/models/": "/v1/models/{model}", "/v1/sessions/": "/v1/sessions/{session_id}"}
"""Beginnings of paths that end with a name."""


def route_label(path: str) -> str:
    """The route of a path: a bounded set, so that clients cannot make up metric labels."""
    if path in _ROUTES:
        return path
    return next((label for start, label in _NAMED.items() if path.startswith(start)), "other")


def request_id(scope: Scope) -> bytes:
    """The id that the client gave, if it can stand in a header and a line of a log, or else a fresh one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _SANE_ID.fullmatch(value):
            return bytes(value)
    return fresh_id()


def fresh_id() -> bytes:
    return b"req_" + secrets.token_hex(16).encode()


class Access:
    """Adds the id to the start of each response. Bodies and the client's disconnect pass untouched."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = request_id(scope)

        async def marking_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(scope, message["status"], own_id)
                message["headers"] = [*message["headers"], (REQUEST_ID, own_id)]
            await send(message)

        try:
            await self._app(scope, receive, marking_send)
        except Exception:
            # The framework has sent a 500 where it still could.
            logger.exception("%s failed, request id %s", _what(scope), own_id.decode())

    def _answered(self, scope: Scope, status: int, own_id: bytes) -> None:
        self._metrics.requests.labels(route_label(scope["path"]), str(status)).inc()
        if status >= 400:
            # Whoever asks for health learns it from the answer.
            own = status >= 500 and not scope["path"].startswith("/health/")
            level = logging.WARNING if own else logging.DEBUG
            logger.log(level, "%d for %s, request id %s", status, _what(scope), own_id.decode())


def _what(scope: Scope) -> str:
    return f"{scope['method']} {scope['path'][:200]!r}"
