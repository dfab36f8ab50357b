"""ASGI middleware for the hosts that a request names, and for the proxies that forward it."""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tandem.frontend.access.allowed_hosts import AllowedHosts, is_address, refusal
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.errors import ApiError
from tandem.frontend.server.paths import is_health_check

UNIX = "unix"
"""Name of the peers of a Unix socket among those that are trusted."""


def trust_proxies(app: ASGIApp, trusted: Sequence[str]) -> ASGIApp:
    """Let `X-Forwarded-*` headers of these peers replace client and scheme.

    trusted: addresses, networks, `unix` or `*`.
    """
    forwarded: Any = ProxyHeadersMiddleware(app, list(trusted))  # type: ignore[arg-type]

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["client"] is None and UNIX in trusted:
            scope["client"] = (UNIX, 0)
        await forwarded(scope, receive, send)

    return run


class StripRootPath:
    """Middleware that serves paths below a prefix as well.

    Some proxies remove it, and some do not.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._root + "/"):
            scope["path"] = scope["path"].removeprefix(self._root) or "/"
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)


_MAX_ACCEPTED = 256
"""Most headers that are remembered: clients send few, unless any port or name is allowed."""


class CheckHost:
    """Middleware that answers 421 to requests for other hosts.

    Health checks by address are answered: orchestrators send them so.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed
        self._accepted: set[tuple[bytes, bool]] = set()
        """Headers that were found to be allowed, and whether they came over a Unix socket."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(scope):
            host = _header(scope).decode("latin-1")
            await error_answer(scope, ApiError(421, refusal(host), None, "host_not_allowed"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        header = _header(scope)
        is_unix = scope["server"] is not None and scope["server"][1] is None
        if (header, is_unix) in self._accepted:
            return True
        host = header.decode("latin-1")
        if self._allowed.accepts(host, is_unix):
            if len(self._accepted) < _MAX_ACCEPTED:
                self._accepted.add((header, is_unix))
            return True
        return is_health_check(scope["path"]) and is_address(host)


def _header(scope: Scope) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name == b"host"), b"")
