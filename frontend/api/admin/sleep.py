"""Routes that release the memory of weights and KV pool for a while, under vLLM's names."""

from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.api.admin.pause import DEFAULT_MODE, query_word, record_unknown
from tandem.frontend.api.admin.weight_access import check_allowed
from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.request.schema import Schema, closed
from tandem.protocol.commands import PAUSE_MODES, SLEEP_TAGS, PauseMode
from tandem.protocol.events import Answer

LEVELS = ("1", "2")
_REFUSED = {
    "403": error_response("The client may not change the weights."),
    "404": error_response("The engine does not sleep."),
    "409": error_response("It cannot now; the message says why."),
    "503": error_response("Not ready, or too little memory is free; try again later."),
}


def wake_tags(request: Request) -> list[str]:
    """Return the tags to wake, given by one parameter each or separated by commas; empty for all.

    Raises ApiError 400 for an unknown one.
    """
    given = [word.strip() for text in request.query_params.getlist("tags") for word in text.split(",")]
    tags = list(dict.fromkeys(filter(None, given)))
    for tag in tags:
        if tag not in SLEEP_TAGS:
            raise unsupported(f"'tags' has {tag[:100]!r}; use {', '.join(sorted(SLEEP_TAGS))}", "tags")
    return tags


def check_answer(answer: Answer) -> None:
    """Raise ApiError 503 for a lack of memory, which may pass, 409 for any other refusal."""
    if answer.lacks_memory:
        raise ApiError(503, answer.message, None, "insufficient_memory")
    if not answer.ok:
        raise ApiError(409, answer.message, None, "sleep_refused")


def sleep_router(service: Service) -> APIRouter:
    """Build the routes. They answer 404 unless the engine lets its weights change."""
    router, calls = APIRouter(), service.client.calls

    @router.post("/sleep", response_class=Response, openapi_extra=_described(
        "The engine sleeps.",
        {"name": "level", "in": "query", "schema": {"enum": [1, 2], "default": 1}},
        {"name": "mode", "in": "query", "schema": {"enum": [*PAUSE_MODES], "default": DEFAULT_MODE}},
    ))  # fmt: skip
    async def sleep(request: Request) -> Response:
        """Release the memory of the weights and of the KV pool, and answer once that is done.

        Level 1 copies the weights to the host, level 2 drops them. Requests that arrive get a 503. Of the open ones,
        mode `abort` ends all, `wait` computes all to their end and `keep` has them continue after the wake.
        """
        check_allowed(service, request)
        record_unknown(service, request, "level", "mode")
        level = int(query_word(request, "level", LEVELS, LEVELS[0]))
        mode = cast(PauseMode, query_word(request, "mode", PAUSE_MODES, DEFAULT_MODE))
        check_answer(await calls.sleep(level, mode))
        return Response()

    @router.post("/wake_up", response_class=Response, openapi_extra=_described(
        "What was to be woken is awake.",
        {"name": "tags", "in": "query", "schema": {"type": "array", "items": {"enum": sorted(SLEEP_TAGS)}}},
    ))  # fmt: skip
    async def wake_up(request: Request) -> Response:
        """Take memory again, and answer once that is done; without tags also load weights that level 2 has dropped.

        Nothing is computed before all is awake and the weights are complete.
        """
        check_allowed(service, request)
        record_unknown(service, request, "tags")
        check_answer(await calls.wake_up(wake_tags(request)))
        return Response()

    state = json_response("The state.", closed({"is_sleeping": {"type": "boolean"}}))
    refused = {status: answer for status, answer in _REFUSED.items() if status != "409"}

    @router.get("/is_sleeping", openapi_extra={"responses": {"200": state, **refused}})
    async def is_sleeping(request: Request) -> dict[str, bool]:
        """Tell whether memory is released, be it of the weights or of the KV pool."""
        check_allowed(service, request)
        return {"is_sleeping": await calls.is_sleeping()}

    return router


def _described(done: str, *parameters: Schema) -> Schema:
    bad = {"400": error_response("A parameter has another value than those allowed.")}
    return {"parameters": [*parameters], "responses": {"200": {"description": done}, **bad, **_REFUSED}}
