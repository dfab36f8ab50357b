"""ASGI middleware: API keys, request ids, and the count and log of responses."""

import logging
import re
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.frontend.api.error_response import error_answer
from tandem.frontend.api.owner import OWNER_KEY
from tandem.frontend.api.request_scope import REQUEST_ID_KEY, speaks_anthropic
from tandem.frontend.api_keys import ApiKeys, owner_name
from tandem.frontend.errors import ApiError
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.request.extra_fields import ignored_label
from tandem.frontend.request.ignored_fields import IGNORED_HEADER, IGNORED_KEY, IgnoredFields
from tandem.frontend.server.rate_limited_log import RateLimitedLog

_BEARER = "'authorization: Bearer KEY'"
_OPEN_PREFIX = "/health/"
"""Prefix of the health checks, which orchestrators and load balancers send without a key."""
_OPEN_PATHS = frozenset(("/health", "/ping"))
"""Paths of the health checks of other servers."""


class RequireKey:
    """Middleware that answers 401 to every request without a valid key.

    It does so even for paths that do not exist. Health checks and `open_paths` need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._valid_key(scope)
        if key is not None:
            scope[OWNER_KEY] = owner_name(key)
            await self._app(scope, receive, send)
            return
        header = "'x-api-key: KEY' or 'authorization: Bearer KEY'" if speaks_anthropic(scope) else _BEARER
        error = ApiError(401, f"a valid API key is required; send the header {header}", None, "invalid_api_key")
        response = error_answer(scope, error)
        response.headers["www-authenticate"] = "Bearer"
        if any(name == b"expect" for name, _ in scope["headers"]):
            # The client may send its body or not; what comes next on the connection cannot be told.
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _valid_key(self, scope: Scope) -> bytes | None:
        """Return the key of a request if it is valid.

        Clients of Anthropic's API send it in a header of their own, `x-api-key`.
        """
        given = [_key(scope), *([_only(scope, b"x-api-key")] if speaks_anthropic(scope) else [])]
        return next((key for key in given if self._keys.accepts(key)), None)

    def _is_open(self, path: str) -> bool:
        return is_health_check(path) or path in self._open_paths


def is_health_check(path: str) -> bool:
    """Tell whether a path is that of a health check."""
    return path.startswith(_OPEN_PREFIX) or path in _OPEN_PATHS


def _key(scope: Scope) -> bytes:
    """Return the bearer token of a request; empty if it has none or several."""
    scheme, _, key = _only(scope, b"authorization").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _only(scope: Scope, header: bytes) -> bytes:
    """Return the value of a header; empty if a request has none or several of it."""
    given = [value for name, value in scope["headers"] if name == header]
    return bytes(given[0]) if len(given) == 1 else b""


logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
ANTHROPIC_REQUEST_ID = b"request-id"
_SANE_ID = re.compile(rb"[\x20-\x7e]{1,128}")

_ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/models", "/tokenize", "/detokenize", "/admin/scheduler", "/metrics", "/version"),
    *("/health", "/ping", "/health/live", "/health/ready", "/openapi.json", "/", "/docs"),
)
_NAMED = {
    "/v1/models/": "/v1/models/{model}",
    "/v1/sessions/": "/v1/sessions/{session_id}",
    "/v1/responses/": "/v1/responses/{response_id}",
}
"""Labels of routes whose paths end with a name, by their prefix."""


def route_label(path: str) -> str:
    """Return the metric label of a path.

    The labels are a bounded set that clients cannot extend.
    """
    if path in _ROUTES:
        return path
    return next((label for start, label in _NAMED.items() if path.startswith(start)), "other")


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


class Access:
    """Middleware that labels, counts and logs responses.

    It adds a request id to each response, counts it and logs failures; bodies pass through unchanged.
    """

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = RateLimitedLog(logger)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_slash(scope)
        own_id = choose_request_id(scope)
        scope[REQUEST_ID_KEY] = own_id.decode()
        id_headers = [(name, own_id) for name in request_id_headers(scope)]

        async def marking_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(scope, message["status"], own_id)
                message["headers"] = [*message["headers"], *id_headers, *self._ignored(scope)]
            await send(message)

        try:
            await self._app(scope, receive, marking_send)
        except Exception:
            # The framework has sent a 500 if the response had not started.
            logger.exception("%s failed, request id %s", _request_line(scope), own_id.decode())

    def _ignored(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Count the fields without effect and return the header that names them."""
        ignored: IgnoredFields | None = scope.get(IGNORED_KEY)
        if ignored is None or not ignored.paths:
            return []
        for label in {ignored_label(path) for path in ignored.paths}:
            self._metrics.ignored_fields.labels(label).inc()
        return [(IGNORED_HEADER.encode(), ignored.header())]

    def _answered(self, scope: Scope, status: int, own_id: bytes) -> None:
        self._metrics.requests.labels(route_label(scope["path"]), str(status)).inc()
        if status >= 400:
            # A health check reports its 503 in the response; it is not logged as a failure.
            is_fault = status >= 500 and not is_health_check(scope["path"])
            line = f"{status} for {_request_line(scope)}, request id {own_id.decode()}"
            if status == 429 or (is_fault and status in (503, 529)):
                self._log.warning(str(status), line)  # of which there are many under overload
            else:
                logger.log(logging.WARNING if is_fault else logging.DEBUG, "%s", line)


def _without_slash(scope: Scope) -> Scope:
    """Return the scope of a request with a path that does not end in a slash.

    Clients that join a base and a path add one; a redirect would lose the body of a POST. The name of a session may end
    in a slash.
    """
    path: str = scope["path"]
    if not path.endswith("/") or path == "/" or path.startswith("/v1/sessions/"):
        return scope
    return {**scope, "path": path.rstrip("/") or "/"}


def _request_line(scope: Scope) -> str:
    return f"{scope['method']} {scope['path'][:200]!r}"
