"""ASGI middleware that calls the endpoints of generating routes directly.

FastAPI's routing would take a fifth of the time of a short request, for features that these endpoints do not use.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import get_type_hints

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.api.error_response import error_answer
from tandem.frontend.api.live_stream import WRITER_KEY
from tandem.frontend.errors import ApiError

Endpoint = Callable[[Request], Awaitable[Response]]


def internal_error(scope: Scope, error: Exception) -> Response:
    """Build the response to a request that raised an unexpected exception.

    The traceback is logged; the client gets only the type of the error.
    """
    message = f"internal error ({type(error).__name__})"
    return error_answer(scope, ApiError(500, message, None, "internal_error"))


def direct_endpoints(routers: Iterable[APIRouter]) -> dict[str, Endpoint]:
    """Collect the endpoints that do not need the framework, by path.

    They take a POST, read the request themselves and return a response.
    """
    return {
        route.path: route.endpoint
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        and route.methods == {"POST"}
        and get_type_hints(route.endpoint) == {"request": Request, "return": Response}
    }


class DirectRoutes:
    """Middleware that serves POST requests to these paths and passes all others on.

    Errors are handled as in the app.
    """

    def __init__(self, app: ASGIApp, endpoints: dict[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        except ApiError as error:
            await error_answer(scope, error)(scope, receive, send)
        except Exception as error:
            if not scope[WRITER_KEY].has_begun:
                await internal_error(scope, error)(scope, receive, send)
            raise
