"""HTTP server of the ops port, for the engine's metrics and health.

The engine's supervisor serves them, not the engine itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.frontend.engine.health import EngineWatch


class QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def ops_app(watch: EngineWatch, registry: CollectorRegistry) -> Starlette:
    """Build the app of `GET /metrics` and `GET /health`."""

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def answer_health(_: Request) -> Response:
        health, heartbeat = watch.health(), watch.heartbeat
        body = {
            "status": health.status,
            "reason": health.reason,
            "epoch": heartbeat.engine_epoch if heartbeat else None,
            "phase": heartbeat.phase.value if heartbeat else None,
            "percent": heartbeat.percent if heartbeat else None,
            "seconds_since_last_beat": round(watch.silence(), 3),
        }
        return JSONResponse(body, 200 if health.ready else 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", answer_health)])


def ops_server(watch: EngineWatch, registry: CollectorRegistry) -> QuietServer:
    """Build the server of the ops port, to be run on a socket of the supervisor."""
    settings = uvicorn.Config(
        ops_app(watch, registry),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        ws="none",
    )
    return QuietServer(settings)
