"""ASGI middleware that answers only requests for hosts that are served."""

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.access.allowed_hosts import AllowedHosts, is_address, refusal
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.errors import ApiError
from tandem.frontend.server.paths import is_health_check

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
