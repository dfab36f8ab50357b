"""OpenAPI document, served as `/openapi.json`.

It combines the descriptions of all routes.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from tandem.frontend.api.openapi import ANTHROPIC_ERROR_BODY, ERROR_BODY, error_response
from tandem.frontend.api.request_scope import ANTHROPIC_PREFIX
from tandem.frontend.request.schema import Schema
from tandem.frontend.server.paths import required_right

_EVERYWHERE = {
    "405": "The path does not support this method.",
    "500": "An error of the server; its log has the request id.",
}
_KEYLESS = ("/health",)
_REQUEST_ID: Schema = {
    "X-Request-Id": {
        "description": "The id of the request: the one that it sent in this header, or a new one.",
        "schema": {"type": "string"},
    }
}


def document(app: FastAPI, routers: Iterable[APIRouter], guarded: bool, names: Sequence[str] | None) -> dict[str, Any]:
    """Build the OpenAPI document of an app made of these routers.

    guarded: requests need an API key. names: the names of the model, or None if they are unknown or arbitrary.
    """
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    # Use the schemas of the routes: the framework converts integer bounds to floats, which changes large ones.
    bodies = {
        (route.path_format, method.lower()): route.openapi_extra["requestBody"]
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.openapi_extra is not None and "requestBody" in route.openapi_extra
        for method in route.methods or ()
    }
    for path, operations in found["paths"].items():
        keyless = path.startswith(_KEYLESS)
        error_body = ANTHROPIC_ERROR_BODY if path.startswith(ANTHROPIC_PREFIX) else ERROR_BODY
        for method, operation in operations.items():
            responses = operation["responses"]
            # Remove the framework's error for invalid parameters, which no route returns.
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            for status, description in _EVERYWHERE.items():
                responses.setdefault(status, error_response(description, error_body))
            if guarded and not keyless:
                operation["security"] = [{"apiKey": []}]
                responses["401"] = error_response("The API key is missing or unknown.", error_body)
                if (right := required_right(path)) is not None:
                    responses["403"] = error_response(f"The API key lacks the right {right.value!r}.", error_body)
            body = bodies.get((path, method))
            if body is not None:
                operation["requestBody"] = body if names is None else _about(names, body)
            for response in responses.values():
                response["headers"] = {**response.get("headers", {}), **_REQUEST_ID}
    components = found.setdefault("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    if guarded:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    return found


def _about(known: Sequence[str], body: Schema) -> Schema:
    """Add the names of the served model to the schema of a body.

    They are added to each `model` field.
    """
    body = deepcopy(body)
    schema = body["content"]["application/json"]["schema"]
    for shape in (schema, *schema.get("anyOf", ())):
        properties = shape.get("properties", {})
        if "model" in properties:
            # Replaced rather than modified, since schemas share parts.
            names = [*known] if "model" in shape.get("required", ()) else [*known, None]
            properties["model"] = {**properties["model"], "enum": names}
    return body
