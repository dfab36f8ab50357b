"""Requests as the client sent them to the proxy in front.

They have its address, its scheme, and the path without the prefix.
"""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

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
