"""Assemble the HTTP application, without global state."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.access.allowed_hosts import AllowedHosts
from tandem.frontend.access.rate_limit_headers import EXPOSED
from tandem.frontend.api.admin.adapters import adapters_router
from tandem.frontend.api.admin.pause import pause_router
from tandem.frontend.api.admin.scheduler import scheduler_router
from tandem.frontend.api.admin.sleep import sleep_router
from tandem.frontend.api.admin.swap import swap_router
from tandem.frontend.api.admin.trainer import trainer_router
from tandem.frontend.api.admin.weight_updates import weight_updates_router
from tandem.frontend.api.chat_completions.route import chat_router
from tandem.frontend.api.completions.route import completions_router
from tandem.frontend.api.error_response import error_answer
from tandem.frontend.api.health import health_router
from tandem.frontend.api.messages.route import messages_router
from tandem.frontend.api.models import models_router
from tandem.frontend.api.page import page_paths, page_router
from tandem.frontend.api.responses.route import responses_router
from tandem.frontend.api.responses.stored_route import stored_responses_router
from tandem.frontend.api.service import Service
from tandem.frontend.api.sessions import sessions_router
from tandem.frontend.api.tokenize import tokenize_router
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IGNORED_HEADER
from tandem.frontend.server.access import Access
from tandem.frontend.server.access_log import AccessLog
from tandem.frontend.server.audit_log import AuditLog
from tandem.frontend.server.direct_routes import DirectRoutes, direct_endpoints, internal_error
from tandem.frontend.server.hosts import CheckHost, StripRootPath, trust_proxies
from tandem.frontend.server.openapi import document
from tandem.frontend.server.paths import is_health_check, missing_route, needed_flags
from tandem.frontend.server.refuse_cross_site import RefuseCrossSite
from tandem.frontend.server.require_key import RequireKey
from tandem.protocol.version import distribution_version

if TYPE_CHECKING:
    from tandem.frontend.server.tracing import RequestTracer


def create_app(service: Service) -> ASGIApp:
    """Build the ASGI app of a service, which starts and stops with its lifespan."""
    tracer = _open_tracer(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        tasks = [asyncio.create_task(task) for task in (service.await_link(), service.keys.watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await service.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    app = FastAPI(
        title="Tandem",
        version=distribution_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    routers = build_routers(service)
    for router in routers:
        # Not include_router(), which copies every route to apply a prefix and dependencies. These routes have none.
        app.router.routes.extend(router.routes)
    _install_error_handlers(app)
    _install_openapi(app, routers, service)
    return _wrap_middleware(DirectRoutes(app, direct_endpoints(routers)), service, tracer)


def build_routers(service: Service) -> list[APIRouter]:
    """Build all routes except `/openapi.json`."""
    generating = (completions_router, chat_router, responses_router, messages_router)
    others = (
        stored_responses_router,
        models_router,
        tokenize_router,
        sessions_router,
        scheduler_router,
        pause_router,
        trainer_router,
        weight_updates_router,
        adapters_router,
        swap_router,
        sleep_router,
        health_router,
    )
    return [*(maker(service) for maker in (*generating, *others)), page_router()]


def _install_openapi(app: FastAPI, routers: Sequence[APIRouter], service: Service) -> None:
    """Serve `/openapi.json`.

    It names the model and its adapters once the engine is ready. The last one is cached, since building it takes tens
    of milliseconds.
    """
    built: dict[tuple[str, ...] | None, dict[str, Any]] = {}

    def openapi() -> dict[str, Any]:
        own = service.client.ready().model.name if service.client.health().takes_requests else None
        names = None
        if own is not None and not service.names.accepts_any:
            names = tuple(dict.fromkeys([*service.names.listed(own), *service.client.adapters]))
        if names not in built:
            built.clear()
            built[names] = document(app, routers, service.keys.is_required, names)
            if service.config.root_path:
                built[names]["servers"] = [{"url": service.config.root_path}]
        return built[names]

    app.openapi = openapi  # type: ignore[method-assign]


def _open_tracer(service: Service) -> "RequestTracer | None":
    """Open the tracer if traces are enabled.

    Its packages are imported only then.
    """
    if not service.config.otlp_traces_endpoint:
        return None
    from tandem.frontend.server.tracing import open_tracer

    return open_tracer(service.config.otlp_traces_endpoint, service.metrics.traces)


def _wrap_middleware(app: ASGIApp, service: Service, tracer: "RequestTracer | None") -> ASGIApp:
    """Wrap the app in its middleware, innermost first.

    Every response gets a request id and is counted, and a browser page of an allowed origin can read why a request was
    refused.
    """
    config = service.config
    if service.keys.is_required:
        app = RequireKey(app, service.keys, page_paths().keys(), service.client)
    else:
        app = RefuseCrossSite(app, config.cors_origins)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", IGNORED_HEADER, *EXPOSED],
        )
    access = AccessLog(config.access_log)
    app = _after_first_link(app, service)
    if config.allowed_hosts:
        app = CheckHost(app, AllowedHosts(config.allowed_hosts))
    app = Access(app, service.metrics, access, AuditLog(), config.log_requests, tracer)
    if config.root_path:
        app = StripRootPath(app, config.root_path)
    return trust_proxies(app, config.forwarded_allow_ips) if config.forwarded_allow_ips else app


def _after_first_link(app: ASGIApp, service: Service) -> ASGIApp:
    """Hold requests after the start until the engine is connected."""

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if not service.link_awaited.is_set() and scope["type"] == "http" and not is_health_check(scope["path"]):
            await service.link_awaited.wait()
        await app(scope, receive, send)

    return wait


def _install_error_handlers(app: FastAPI) -> None:
    """Format every error as its API does, even those raised by the framework."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_answer(request.scope, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = missing_route(request.url.path) or _refused_route(request, error)
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        answer = error_answer(request.scope, ApiError(error.status_code, message, None, code))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_answer(request.scope, ApiError(400, first["msg"], str(first["loc"][-1]), "invalid_value"))

    @app.exception_handler(Exception)
    async def server_error(request: Request, error: Exception) -> Response:
        return internal_error(request.scope, error)


def _refused_route(request: Request, error: HTTPException) -> str:
    """Return an error message that points to existing routes or methods."""
    request_line = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        flags = needed_flags(request.url.path)
        hint = f"start the server with {flags}" if flags else "GET /openapi.json lists all routes"
        return f"{request_line}: not found; {hint}"
    allowed = (error.headers or {}).get("Allow")
    return f"{request_line}: {error.detail}" + (f"; use {allowed}" if allowed else "")
