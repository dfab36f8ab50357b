"""ASGI middleware for authentication and authorization by API key."""

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.frontend.access.api_key import API_KEY, ApiKey, Right
from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.access.rate_limit_headers import rate_limit_headers
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.api.request_scope import speaks_anthropic
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.errors import ApiError
from tandem.frontend.server.paths import is_health_check, required_right

_BEARER = "'authorization: Bearer KEY'"


class RequireKey:
    """Middleware that refuses requests without a valid key.

    It responds with 401, also for unknown paths, and with 403 if the key lacks the right that the route needs. Health
    checks and `open_paths` need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str], client: EngineClient) -> None:
        """Initialize the middleware.

        client: provides the usage of the keys' limits.
        """
        self._app = app
        self._keys = keys
        self._client = client
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._valid_key(scope)
        if key is None:
            await self._refuse(scope, receive, send)
            return
        scope[API_KEY] = key
        right = required_right(scope["path"])
        if right is Right.GENERATE and right in key.rights:
            await self._app(scope, receive, self._with_rate_limits(scope, key, send))
        elif right is None or right in key.rights:
            await self._app(scope, receive, send)
        else:
            await error_answer(scope, _missing(key, right, scope["path"]))(scope, receive, send)

    def _with_rate_limits(self, scope: Scope, key: ApiKey, send: Send) -> Send:
        """Return a `send` that adds rate limit headers for a key.

        Usage reported before the request is stale and is not sent.
        """
        if key.limits.max_concurrent is None and key.limits.tokens_per_minute is None:
            return send
        known = self._client.key_usage.get(key.name)

        async def send_with_rate_limits(message: Message) -> None:
            usage = self._client.key_usage.get(key.name)
            if message["type"] == "http.response.start" and usage is not None and usage is not known:
                headers = rate_limit_headers(usage, speaks_anthropic(scope))
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        return send_with_rate_limits

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = "'x-api-key: KEY' or 'authorization: Bearer KEY'" if speaks_anthropic(scope) else _BEARER
        error = ApiError(401, f"a valid API key is required; send the header {header}", None, "invalid_api_key")
        response = error_answer(scope, error)
        response.headers["www-authenticate"] = "Bearer"
        if any(name == b"expect" for name, _ in scope["headers"]):
            # With `Expect: 100-continue` the client may or may not send its body, so framing is lost.
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _valid_key(self, scope: Scope) -> ApiKey | None:
        """Return the API key of a request, or None if it has no valid one.

        Clients of Anthropic's API may use the header `x-api-key`.
        """
        given = [_key(scope), *([_only(scope, b"x-api-key")] if speaks_anthropic(scope) else [])]
        ring = self._keys.ring
        return next((key for secret in given if (key := ring.find(secret)) is not None), None)

    def _is_open(self, path: str) -> bool:
        return is_health_check(path) or path in self._open_paths


def _missing(key: ApiKey, right: Right, path: str) -> ApiError:
    message = (
        f"the API key {key.name!r} lacks the right {right.value!r}, which {path[:200]} needs; use a key that has it "
        "(`rights` in the file of --api-keys)"
    )
    return ApiError(403, message, None, "insufficient_permissions")


def _key(scope: Scope) -> bytes:
    """Return the bearer token of a request; empty if it has none or several."""
    scheme, _, key = _only(scope, b"authorization").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _only(scope: Scope, header: bytes) -> bytes:
    """Return the value of a header; empty if it is missing or repeated."""
    given = [value for name, value in scope["headers"] if name == header]
    return bytes(given[0]) if len(given) == 1 else b""
