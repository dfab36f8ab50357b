"""The routes of stored responses."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Raw
from starlette.responses import Response

from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.owner import owner_of
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.schema import STRING, closed
from tandem.frontend.store.store import ConversationTooLargeError
from tandem.frontend.store.store_worker import StoreWorker
from tandem.frontend.store.stored_response import StoredItem, StoredResponse

MAX_LISTED = 100
DEFAULT_LISTED = 20

_RESPONSE: dict[str, Any] = {"type": "object", "properties": {"id": STRING, "object": {"const": "response"}}}
_DELETED = closed({"id": STRING, "object": {"const": "response"}, "deleted": {"const": True}})
_LIST = closed(
    {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"type": "object"}},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    }
)
_ERRORS = {
    "400": error_response("A parameter is malformed."),
    "404": error_response("The response does not exist, or belongs to another API key."),
    "503": error_response("The store cannot be read; try again later."),
}


def stored_responses_router(service: Service) -> APIRouter:
    """Build the routes below `/v1/responses/{response_id}`."""
    router = APIRouter()

    @router.get(
        "/v1/responses/{response_id}",
        openapi_extra={"responses": {"200": json_response("The response.", _RESPONSE), **_ERRORS}},
    )
    async def retrieve(request: Request, response_id: str) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise malformed("{param}: only responses in the background can be streamed again; leave it out", "stream")
        found = await _found(service, request, response_id)
        return _json(_response(found))

    @router.delete(
        "/v1/responses/{response_id}",
        openapi_extra={"responses": {"200": json_response("The response is deleted.", _DELETED), **_ERRORS}},
    )
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Delete a stored response."""
        if not await _store(service, response_id).delete(owner_of(request.scope), response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get(
        "/v1/responses/{response_id}/input_items",
        openapi_extra={"responses": {"200": json_response("A page of items, newest first.", _LIST), **_ERRORS}},
    )
    async def input_items(
        request: Request,
        response_id: str,
        order: Literal["asc", "desc"] = "desc",
        limit: int = DEFAULT_LISTED,
        after: str | None = None,
    ) -> Response:
        """List the items that a stored response read.

        Those of the responses before it are among them.
        """
        if not 1 <= limit <= MAX_LISTED:
            raise unsupported(f"{{param}} must be between 1 and {MAX_LISTED}, not {limit}", "limit")
        found = await _found(service, request, response_id)
        items = await _input(service, request, found)
        return _json(_page(items if order == "asc" else items[::-1], limit, after))

    @router.post(
        "/v1/responses/{response_id}/cancel",
        openapi_extra={"responses": {"200": json_response("Never: no response runs in the background.", _RESPONSE),
                                     **_ERRORS}},
    )  # fmt: skip
    async def cancel(request: Request, response_id: str) -> Response:
        """Refuse to cancel a response: it ended before it was stored."""
        await _found(service, request, response_id)
        raise ApiError(400, "Cannot cancel a synchronous response.", None, "invalid_request")

    return router


def _store(service: Service, response_id: str) -> StoreWorker:
    if service.store is None:
        raise _not_found(response_id, " (this server stores none: --store off)")
    return service.store


async def _found(service: Service, request: Request, response_id: str) -> StoredResponse:
    found = await _store(service, response_id).get(owner_of(request.scope), response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str, why: str = "") -> ApiError:
    message = f"Response with id {response_id[:100]!r} not found{why}."
    return ApiError(404, message, "response_id", "response_not_found")


async def _input(service: Service, request: Request, found: StoredResponse) -> list[StoredItem]:
    """Collect the items that a response read.

    Those of the responses before it come first.
    """
    if found.previous is None:
        return list(found.input)
    store, owner = _store(service, found.id), owner_of(request.scope)
    try:
        items = await store.conversation(owner, found.id, service.config.max_body)
    except ConversationTooLargeError as error:
        raise unsupported(f"the items have {error.size} bytes, too many to be listed", "response_id") from None
    if items is None:
        raise _not_found(found.id)
    return items[: len(items) - len(found.output)]


def _response(found: StoredResponse) -> dict[str, Raw]:
    fields = msgspec.json.decode(found.body, type=dict[str, Raw])
    fields["output"] = Raw(_array(found.output))
    return fields


def _page(items: list[StoredItem], limit: int, after: str | None) -> dict[str, Any]:
    ids = [item.id for item in items]
    if after is not None:
        if after not in ids:
            raise malformed(f"{{param}}: {after[:100]!r} is not an item of this response", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": Raw(_array(page)),
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(items) > limit,
    }


def _array(items: Sequence[StoredItem]) -> bytes:
    return b"[" + b",".join([item.body for item in items]) + b"]"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
