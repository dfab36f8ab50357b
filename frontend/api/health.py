"""Routes for liveness, readiness, metrics and version of this process."""

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tandem.frontend.api.openapi import json_response
from tandem.frontend.api.service import Service
from tandem.frontend.errors import error_headers
from tandem.protocol.version import PROTOCOL_VERSION, distribution_version


def health_router(service: Service) -> APIRouter:
    """Build the routes of liveness, readiness, metrics and version."""
    router = APIRouter()

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live")
    async def live() -> dict[str, str]:
        """Answer 200 as long as this process can answer."""
        return {"status": "live"}

    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health",
        openapi_extra={"responses": {"503": json_response("No completion would be accepted.", {"type": "object"})}},
    )
    @router.head("/ping", include_in_schema=False)
    @router.get("/ping", include_in_schema=False)
    async def health() -> JSONResponse:
        """Answer like `/health/ready`; other servers have readiness here."""
        return await ready()

    @router.head("/health/ready", include_in_schema=False)
    @router.get(
        "/health/ready",
        openapi_extra={"responses": {"503": json_response("No completion would be accepted.", {"type": "object"})}},
    )
    async def ready() -> JSONResponse:
        """Answer 200 if a completion would be accepted, otherwise 503 with the reason."""
        health = service.health()
        if health.ready:
            engine = service.ready()
            formats = {"weights": engine.model.weight_format, "kv_dtype": engine.model.kv_dtype}
            return JSONResponse(
                {
                    "status": "ready",
                    "model": engine.model.name,
                    "device": engine.model.device,
                    "dtype": engine.model.dtype,
                    **{name: form for name, form in formats.items() if form},
                    "max_len": engine.model.max_len,
                    "kv_tokens": engine.limits.kv_tokens,
                }
            )
        body: dict[str, Any] = {"status": health.status, "reason": health.reason}
        if health.percent is not None:
            body["percent"] = health.percent
        return JSONResponse(body, 503, error_headers(503, service.client.seconds_until_ready()))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics of all frontends in the Prometheus text format."""
        return Response(await service.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, Any]:
        """Return the versions of the distribution and of the protocol to the engine."""
        return {"version": distribution_version(), "protocol": PROTOCOL_VERSION}

    return router
