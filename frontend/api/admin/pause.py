"""Routes of `/admin/pause` and `/admin/resume`.

Modes and names follow vLLM's `/pause`, `/resume` and `/is_paused`.
"""

from typing import Any, Literal, cast

from fastapi import APIRouter, Request

from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.request.schema import Schema, closed
from tandem.protocol.commands import PAUSE_MODES, PauseMode
from tandem.protocol.events import PauseFacts

DEFAULT_MODE: PauseMode = "abort"
NEW_REQUESTS = ("hold", "refuse")
"""What happens to requests that arrive during a pause: they wait, or get a 503."""

PauseStatus = Literal["running", "pausing", "paused"]

PAUSE = closed(
    {
        "is_paused": {"type": "boolean"},
        "status": {"enum": ["running", "pausing", "paused"]},
        "mode": {"enum": [*PAUSE_MODES, None]},
        "new_requests": {"enum": [*NEW_REQUESTS, None]},
    }
)
_TRUE, _FALSE = ("true", "1", "t", "yes", "y", "on"), ("false", "0", "f", "no", "n", "off")
_NOT_READY = error_response("Not ready; try again later.")


def pause_status(pause: PauseFacts) -> PauseStatus:
    """Return whether an engine runs, drains its pipeline for a pause, or is paused."""
    if pause.mode is None:
        return "running"
    return "paused" if pause.is_complete else "pausing"


def pause_body(pause: PauseFacts) -> dict[str, Any]:
    """Convert a pause to JSON.

    Its mode is null while the engine runs.
    """
    status, mode = pause_status(pause), pause.mode
    new_requests = None if mode is None else NEW_REQUESTS[pause.refuses_new]
    return {"is_paused": status == "paused", "status": status, "mode": mode, "new_requests": new_requests}


def query_word(request: Request, name: str, allowed: tuple[str, ...], default: str) -> str:
    """Return a query parameter with a fixed set of values.

    Raises ApiError 400 for any other value.
    """
    word = request.query_params.get(name, default)
    if word not in allowed:
        raise unsupported(f"{name!r} is {word[:100]!r}; use one of {', '.join(allowed)}", name)
    return word


def record_unknown(service: Service, request: Request, *known: str) -> None:
    """Record the query parameters without effect, which the header `x-tandem-ignored` names.

    Raises ApiError 400 for one with `--unknown-fields refuse`.
    """
    ignored = service.ignored_fields(request)
    for name in request.query_params:
        if name not in known:
            ignored.add(name)


def query_flag(request: Request, name: str, *, default: bool) -> bool:
    """Return a boolean query parameter, in the words and spellings that pydantic takes, such as Python's True.

    Raises ApiError 400 for any other value.
    """
    word = request.query_params.get(name, str(default))
    if word.lower() not in (*_TRUE, *_FALSE):
        raise unsupported(f"{name!r} is {word[:100]!r}; use true or false", name)
    return word.lower() in _TRUE


def _parameter(name: str, allowed: tuple[str, ...], default: str) -> Schema:
    return {"name": name, "in": "query", "schema": {"enum": [*allowed], "default": default}}


def pause_router(service: Service) -> APIRouter:
    """Build the routes that pause and resume the engine."""
    router = APIRouter()
    calls = service.client.calls

    @router.get(
        "/admin/pause",
        openapi_extra={"responses": {"200": json_response("The state at one moment.", PAUSE), "503": _NOT_READY}},
    )
    async def get_pause() -> dict[str, Any]:
        """Tell whether the engine is paused, and in which mode."""
        return pause_body(await calls.inspect_pause())

    @router.post(
        "/admin/pause",
        openapi_extra={
            "parameters": [
                _parameter("mode", PAUSE_MODES, DEFAULT_MODE),
                _parameter("new_requests", NEW_REQUESTS, NEW_REQUESTS[0]),
            ],
            "responses": {
                "200": json_response("The engine is paused.", PAUSE),
                "400": error_response("A parameter has another value than those allowed."),
                "409": error_response("The engine was resumed before it had paused."),
                "503": _NOT_READY,
            },
        },
    )
    async def pause(request: Request) -> dict[str, Any]:
        """Pause the engine, and answer once no step is in flight.

        Of the open requests, mode `abort` ends all, `wait` computes those that have begun to their end and `keep`
        freezes all until the engine is resumed. Requests that arrive wait (`new_requests=hold`) or get a 503
        (`refuse`).
        """
        record_unknown(service, request, "mode", "new_requests")
        mode = cast(PauseMode, query_word(request, "mode", PAUSE_MODES, DEFAULT_MODE))
        new_requests = query_word(request, "new_requests", NEW_REQUESTS, NEW_REQUESTS[0])
        if refusal := await calls.pause(mode, new_requests == "refuse"):
            raise ApiError(409, refusal, None, "engine_resumed")
        return {"is_paused": True, "status": "paused", "mode": mode, "new_requests": new_requests}

    @router.post(
        "/admin/resume",
        openapi_extra={"responses": {"200": json_response("The engine runs.", PAUSE), "503": _NOT_READY}},
    )
    async def resume() -> dict[str, Any]:
        """Have the engine go on where a pause stopped it.

        An engine that runs already is left as it is.
        """
        await calls.resume()
        return {"is_paused": False, "status": "running", "mode": None, "new_requests": None}

    return router
