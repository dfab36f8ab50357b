"""ASGI middleware that answers only requests for hosts that are served."""

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.access.allowed_hosts import AllowedHosts, is_address, refusal
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.errors import ApiError
from tandem.frontend.server.paths import is_health_check


class CheckHost:
    """Middleware that answers 421 to requests for other hosts.

    Health checks by address are answered: orchestrators send them so.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(scope):
            host = _host(scope)
            await error_answer(scope, ApiError(421, refusal(host), None, "host_not_allowed"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        host = _host(scope)
        is_unix = scope["server"] is not None and scope["server"][1] is None
        return self._allowed.accepts(host, is_unix) or (is_health_check(scope["path"]) and is_address(host))


def _host(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
