"""The ops port: the engine's metrics and health, served by its supervisor and never by the engine's own process."""

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.frontend.engine.monitor import EngineMonitor


class QuietServer(uvicorn.Server):
    """A server inside a process that handles its signals itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def ops_app(monitor: EngineMonitor, registry: CollectorRegistry) -> Starlette:
    """`GET /metrics` and `GET /health`."""

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def answer_health(_: Request) -> Response:
        health = monitor.health()
        beat = monitor.beat
        body = {
            "status": health.status,
            "reason": health.reason,
            "epoch": beat.engine_epoch if beat else None,
            "phase": beat.phase.value if beat else None,
            "percent": beat.percent if beat else None,
            "seconds_since_last_beat": round(monitor.silence(), 3),
        }
        return JSONResponse(body, 200 if health.ready else 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", answer_health)])


def ops_server(monitor: EngineMonitor, registry: CollectorRegistry) -> QuietServer:
    """To be run on a socket of the supervisor's."""
    settings = uvicorn.Config(
        ops_app(monitor, registry),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        ws="none",
    )
    return QuietServer(settings)
