"""HTTP server of the ops port: metrics and health of all processes.

It runs in the supervisor, not in the processes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.access.allowed_hosts import AllowedHosts, is_address, refusal
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.start_estimate import UNKNOWN_SECONDS
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.supervisor.frontends.frontends import Frontends

NO_FRONTEND = "no_frontend"
"""Status while the engine is ready but no frontend is."""


class QuietServer(uvicorn.Server):
    """uvicorn server that does not handle signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FrontendCollector(Collector):
    """Prometheus collector of the frontend processes, with a series for each slot."""

    def __init__(self, frontends: Frontends) -> None:
        self._frontends = frontends

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("tandem_frontend_up", "1 while the frontend of the slot serves.", labels=["slot"])
        text = (
            "Processes of the slot that were started after the first: `exit` if the one before ended by itself or was "
            "killed by others, `hang` if its supervisor killed it, `replaced` if a signal asked it to leave."
        )
        restarts = CounterMetricFamily("tandem_frontend_restarts", text, labels=["slot", "reason"])
        for slot in self._frontends.slots:
            up.add_metric([str(slot.number)], float(slot.is_covered))
            for reason, count in slot.restarts.items():
                restarts.add_metric([str(slot.number), reason], count)
        yield up
        yield restarts


def ops_app(
    watch: EngineWatch | None, frontends: Frontends | None, exposition: Exposition, http_urls: Sequence[str] = ()
) -> Starlette:
    """Build the app of `GET /metrics` and the health routes.

    http_urls: URLs of the API, named in the 404 of its routes; empty without frontends.
    """

    async def metrics(_: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    async def answer_health(_: Request) -> Response:
        body = health(watch, frontends)
        if body["status"] == "ready":
            return JSONResponse(body)
        seconds = UNKNOWN_SECONDS
        if watch is not None and body["status"] != NO_FRONTEND:
            seconds = watch.seconds_until_ready()
        return JSONResponse(body, 503, {"retry-after": str(seconds)})

    async def answer_live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    api = f"is on {' and '.join(http_urls)}" if http_urls else "is served by the frontends, `tandem frontend`"

    async def answer_missing(_request: Request, _error: Exception) -> Response:
        message = f"this is the ops port, which serves /metrics and /health only; the API {api}"
        return JSONResponse({"error": {"message": message, "code": "unknown_url"}}, 404)

    return Starlette(
        exception_handlers={404: answer_missing},
        routes=[
            Route("/metrics", metrics),
            Route("/health", answer_health),
            Route("/health/ready", answer_health),
            Route("/health/live", answer_live),
        ],
    )


def health(watch: EngineWatch | None, frontends: Frontends | None) -> dict[str, Any]:
    """Describe the status of the engine and the frontends; at least one of both is given.

    The status is `ready` if requests can be served: the engine and at least one frontend are ready. Without `watch` the
    frontends report the status of their engine.
    """
    body: dict[str, Any] = {"status": "ready", "reason": ""}
    if watch is not None:
        found, heartbeat = watch.health(), watch.heartbeat
        body = {
            "status": found.status,
            "reason": found.reason,
            "epoch": heartbeat.engine_epoch if heartbeat else None,
            "phase": heartbeat.phase.value if heartbeat else None,
            "percent": heartbeat.percent if heartbeat else None,
            "seconds_since_last_beat": round(watch.silence(), 3),
        }
    elif frontends is not None:
        body["status"], body["reason"] = frontends.engine
    if frontends is not None:
        serving, total = frontends.num_serving, len(frontends.slots)
        body |= {"frontends": total, "frontends_serving": serving}
        if body["status"] == "ready" and not serving:
            body |= {
                "status": NO_FRONTEND,
                "reason": f"none of the frontends ({total}) is ready: they start or drain",
            }
    return body


class CheckOpsHost:
    """Middleware that responds with 421 to requests for other hosts."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
            if not (self._allowed.accepts(host) or is_address(host)):
                await JSONResponse({"error": {"message": refusal(host)}}, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def ops_server(
    watch: EngineWatch | None,
    frontends: Frontends | None,
    exposition: Exposition,
    allowed: AllowedHosts,
    http_urls: Sequence[str] = (),
) -> QuietServer:
    """Create the server of the ops port, to be run on a socket of the supervisor."""
    settings = uvicorn.Config(
        CheckOpsHost(ops_app(watch, frontends, exposition, http_urls), allowed),
        log_level="error",  # strangers could trigger a warning with each malformed request
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        ws="none",
    )
    return QuietServer(settings)
