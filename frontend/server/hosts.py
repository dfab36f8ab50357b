"""ASGI middleware that checks the Host header and trusts the headers of proxies."""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tandem.frontend.access.allowed_hosts import UNIX, AllowedHosts, is_address, refusal
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.api.request_scope import PEER_KEY
from tandem.frontend.errors import ApiError
from tandem.frontend.server.paths import is_health_check


def trust_proxies(app: ASGIApp, trusted: Sequence[str]) -> ASGIApp:
    """Use the client and scheme in `X-Forwarded-*` headers of trusted peers.

    trusted: addresses, networks, `unix` or `*`. The peer of the connection is kept in the scope.
    """
    forwarded: Any = ProxyHeadersMiddleware(app, list(trusted))  # type: ignore[arg-type]

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["client"] is None and UNIX in trusted:
            scope["client"] = (UNIX, 0)
        if scope["type"] == "http":
            scope[PEER_KEY] = scope["client"]
        await forwarded(scope, receive, send)

    return run


class StripRootPath:
    """Middleware that strips the root path, if present.

    Some proxies strip it themselves, and some do not.
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
"""Maximum size of the cache; clients use few Host headers unless any port or name is allowed."""


class CheckHost:
    """Middleware that responds with 421 to requests for other hosts.

    Health checks by IP address are allowed, since orchestrators send them.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed
        self._accepted: set[tuple[bytes, bool]] = set()
        """Cache of allowed Host headers, and whether they came via a Unix socket."""

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
