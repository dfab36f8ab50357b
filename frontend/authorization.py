"""ASGI middleware that lets nobody in without an API key."""

import contextlib
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.api.body import drain
from tandem.frontend.api_keys import ApiKeys
from tandem.frontend.errors import ApiError, error_body

_OPEN_PREFIX = "/health/"
"""Whoever restarts or routes around a process asks these, and has no key."""


class RequireKey:
    """Answers 401 to every request without a key, also for paths that do not exist.

    Open without one are health and `open_paths`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._keys.knows(_key(scope)):
            await self._app(scope, receive, send)
            return
        await _read(scope, receive)
        message = "a valid API key is required; send the header 'authorization: Bearer KEY'"
        body = error_body(401, message, None, "invalid_api_key")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_open(self, path: str) -> bool:
        return path.startswith(_OPEN_PREFIX) or path in self._open_paths


async def _read(scope: Scope, receive: Receive) -> None:
    """Lets the client send its body, unless it waits for leave to: many read no answer before they have."""
    if not any(name == b"expect" for name, _ in scope["headers"]):
        with contextlib.suppress(ApiError):
            await drain(receive)


def _key(scope: Scope) -> bytes:
    """The key that a request brings; empty, which is none, where it brings none or several."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return b""
    scheme, _, key = bytes(given[0]).partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
