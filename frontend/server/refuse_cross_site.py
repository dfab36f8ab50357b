"""ASGI middleware that refuses operator requests of web pages from elsewhere."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.access.allowed_hosts import ANY
from tandem.frontend.access.api_key import Right
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.errors import ApiError
from tandem.frontend.server.paths import required_right

_READS = ("GET", "HEAD", "OPTIONS")


class RefuseCrossSite:
    """Middleware that responds with 403 to operator requests that a page of another origin has a browser send.

    It is needed without API keys only: a page does not know them. A browser sends a POST without a body's type, or with
    `text/plain`, to any server that it reaches, and only the answer is kept from the page.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """Keep the app. origins: those whose pages may read answers (--cors-origin)."""
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READS and required_right(scope["path"]) is Right.ADMIN:
            headers = Headers(scope=scope)
            if not self._is_allowed(headers):
                message = (
                    f"pages of {headers.get('origin', 'other sites')[:200]!r} may not operate a server without API "
                    "keys; allow it (--cors-origin), or give the server keys (--api-keys)"
                )
                await error_answer(scope, ApiError(403, message, None, "cross_site"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        """Return whether a request has the origin of this server or an allowed one, or comes from no browser."""
        origin = headers.get("origin")
        if ANY in self._origins or origin in self._origins:
            return True
        site = headers.get("sec-fetch-site", "").strip().lower()
        if site in ("cross-site", "same-origin"):  # Set by browsers alone; behind a proxy, Host may be the server's.
            return site == "same-origin"
        return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").strip().lower()
