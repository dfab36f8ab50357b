"""The HTTP application: one function builds the parts and wires them, nothing is global."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response

from frontend.access import CountRequests
from frontend.config import FrontendConfig
from frontend.engine_client import EngineClient
from frontend.engine_watch import EngineWatch
from frontend.errors import ApiError, error_body, error_headers
from frontend.metrics import FrontendMetrics
from frontend.routes.completions import completions_router
from frontend.routes.health import health_router
from frontend.routes.models import models_router
from frontend.service import Service
from frontend.tokenizer import load_tokenizer
from protocol.version import distribution_version


def build_service(config: FrontendConfig) -> Service:
    """Builds the parts. Raises TokenizerError if the model folder has no usable tokenizer."""
    metrics = FrontendMetrics(CollectorRegistry())
    tokenizer = load_tokenizer(config.model_dir)
    watch = EngineWatch(config.beat_timeout, config.step_timeout)
    client = EngineClient(config.endpoint, config.transport, tokenizer.fingerprint, watch, metrics)
    return Service(config, client, tokenizer, metrics)


def create_app(service: Service) -> FastAPI:
    """The ASGI app over these parts; they start and stop with its lifespan."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.client.start()
        try:
            yield
        finally:
            await service.client.stop()
            service.tokenizer.close()
            service.parser.close()

    app = FastAPI(title="Tandem", version=distribution_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(completions_router(service))
    app.include_router(models_router(service))
    app.include_router(health_router(service))
    app.add_middleware(CountRequests, metrics=service.metrics)
    _shape_errors(app)
    return app


def _json_error(status: int, body: bytes, headers: dict[str, str]) -> Response:
    return Response(body, status, {**headers, **error_headers(status)}, "application/json")


def _shape_errors(app: FastAPI) -> None:
    """Gives every error the OpenAI body, also those that the framework finds."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return _json_error(error.status, error.body(), {})

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        body = error_body(error.status_code, message, None, code)
        return _json_error(error.status_code, body, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _json_error(422, error_body(422, first["msg"], str(first["loc"][-1]), "invalid_value"), {})

    @app.exception_handler(Exception)
    async def server_error(_: Request, error: Exception) -> Response:
        # The framework logs the traceback; a client learns no more than that it was not its fault.
        return _json_error(500, error_body(500, f"internal error ({type(error).__name__})", None, "internal_error"), {})
