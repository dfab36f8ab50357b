"""ASGI middleware that counts what was answered."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.metrics import FrontendMetrics

_ROUTES = ("/v1/completions", "/v1/models", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json")


def route_label(path: str) -> str:
    """The route of a path: a bounded set, so that clients cannot make up metric labels."""
    if path in _ROUTES:
        return path
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


class CountRequests:
    """Counts responses by route and status, without touching their bodies or the client's disconnect."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = route_label(scope["path"])

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)
