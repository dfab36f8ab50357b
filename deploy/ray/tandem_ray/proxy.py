"""ASGI application that hands requests to a service on a unix socket."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CONNECTION_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer", b"upgrade")
)
"""Headers of one connection (RFC 9110, 7.6.1), which a proxy does not pass on."""
_SECONDS_TO_CONNECT = 5.0


class UnixProxy:
    """Reverse proxy to one unix socket, which keeps nothing back.

    Each chunk of an answer is sent on as it comes. A client that leaves cancels the call, which closes the connection
    to the service, and the service ends the request. Statuses, bodies and headers pass unchanged in both directions,
    but for those of a connection and the answer's `x-request-id`: Ray puts the id into the request, and into the
    answer, itself.
    """

    def __init__(self, path: str) -> None:
        """Set the path of the socket."""
        timeout = httpx.Timeout(None, connect=_SECONDS_TO_CONNECT)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path, limits=limits), base_url="http://localhost", timeout=timeout
        )
        """Client of the service, for one event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._pass_on(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = request_headers(scope)
        names = {name for name, _ in headers}
        has_body = b"transfer-encoding" in names or b"content-length" in names
        request = self.client.build_request(
            scope["method"], _url(scope), headers=headers, content=_body(receive) if has_body else None
        )
        # httpx adds what a client of its own would send; the service is to see what this client has sent.
        request.headers = httpx.Headers(headers)
        try:
            response = await self.client.send(request, stream=True)
        except httpx.TransportError as error:
            await _refuse(scope, send, error)
            return
        try:
            answer = [pair for pair in response.headers.raw if pair[0].lower() not in _DROPPED]
            await send({"type": "http.response.start", "status": response.status_code, "headers": answer})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await response.aclose()


_DROPPED = CONNECTION_HEADERS | {b"transfer-encoding", b"x-request-id", b"date", b"server"}


def request_headers(scope: Scope) -> Headers:
    """Return the headers for the service.

    The client's address is appended to `x-forwarded-for`, and `x-forwarded-proto` says how it came.
    """
    headers: Headers = [(name, text) for name, text in scope["headers"] if name not in CONNECTION_HEADERS]
    names = {name for name, _ in headers}
    if scope.get("client"):
        headers.append((b"x-forwarded-for", str(scope["client"][0]).encode("latin-1")))
    if b"x-forwarded-proto" not in names:
        headers.append((b"x-forwarded-proto", str(scope.get("scheme", "http")).encode()))
    if b"host" not in names:
        headers.append((b"host", b"localhost"))
    return headers


def _url(scope: Scope) -> httpx.URL:
    """Return the URL of the service for a request.

    Its path is as the client wrote it, below the prefix of the application.
    """
    path = scope.get("raw_path") or scope["path"].encode()
    prefix = scope.get("root_path", "").encode()
    if prefix and path.startswith(prefix):
        path = path[len(prefix) :] or b"/"
    query = scope.get("query_string", b"")
    return httpx.URL("http://localhost", raw_path=path + (b"?" + query if query else b""))


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body of a request as it comes."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise httpx.ReadError("the client left before its request was complete")
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


async def _refuse(scope: Scope, send: Send, error: httpx.TransportError) -> None:
    """Answer for a service that cannot be reached, in the shape of the route."""
    text = f"the service of this replica cannot be reached ({error or type(error).__name__}); try again"
    refusal: dict[str, Any] = {"error": {"message": text, "type": "server_error", "param": None, "code": "not_ready"}}
    if scope["path"].rstrip("/").endswith(("/v1/messages", "/v1/messages/count_tokens")):
        refusal = {"type": "error", "error": {"type": "overloaded_error", "message": text}}
    body = json.dumps(refusal).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
