"""Routes of stored responses."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Raw
from starlette.responses import Response

from tandem.frontend.api.byte_budget import MAX_INLINE_BODY, Reservation
from tandem.frontend.api.large_answer import json_answer
from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.owner import owner_of
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.schema import STRING, closed
from tandem.frontend.store.store import (
    ItemPage,
    PageQuery,
    StoredItem,
    StoredResponse,
    StoredTooLargeError,
    UnknownItemError,
)
from tandem.frontend.store.store_worker import StoreWorker

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
        with _reserved(service, request) as reservation:
            found = await _found(service, request, response_id, reservation)
            small = len(found.body) <= MAX_INLINE_BODY
            parts = _response(found) if small else await service.parser.run(_response, found)
            return json_answer(parts, reservation, service.config.connections)

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
        """List the input items of a stored response, including the ones of previous responses."""
        if not 1 <= limit <= MAX_LISTED:
            raise unsupported(f"{{param}} must be between 1 and {MAX_LISTED}, not {limit}", "limit")
        with _reserved(service, request) as reservation:
            # The id and status make a stored item a little longer than its request.
            query = PageQuery(limit, service.config.max_body + MAX_INLINE_BODY, order == "asc", after)
            page = await _page(service, request, response_id, query, reservation)
            return json_answer(_listed(page), reservation, service.config.connections)

    @router.post(
        "/v1/responses/{response_id}/cancel",
        openapi_extra={
            "responses": {"200": json_response("Never: no response runs in the background.", _RESPONSE), **_ERRORS}
        },
    )
    async def cancel(request: Request, response_id: str) -> Response:
        """Refuse to cancel a response: only finished ones are stored."""
        with contextlib.suppress(StoredTooLargeError):
            if await _store(service, response_id).get(owner_of(request.scope), response_id, 0) is None:
                raise _not_found(response_id)
        raise ApiError(400, "Cannot cancel a synchronous response.", None, "invalid_request")

    return router


def _store(service: Service, response_id: str) -> StoreWorker:
    if service.store is None:
        raise _not_found(response_id, " (this server stores none: --store off)")
    return service.store


@contextmanager
def _reserved(service: Service, request: Request) -> Iterator[Reservation]:
    """Reserve memory for an answer; release it on an exception."""
    reservation = service.stored_budget.reservation(owner_of(request.scope))
    try:
        yield reservation
    except BaseException:
        reservation.release()
        raise


async def _found(service: Service, request: Request, response_id: str, reservation: Reservation) -> StoredResponse:
    store, owner = _store(service, response_id), owner_of(request.scope)
    try:
        found = await store.get(owner, response_id, MAX_INLINE_BODY)
    except StoredTooLargeError as error:
        size = error.size
        # A large body is copied once, to insert its output.
        reservation.grow(2 * size)
        found = await store.get(owner, response_id, size)
    if found is None:
        raise _not_found(response_id)
    return found


async def _page(
    service: Service, request: Request, response_id: str, query: PageQuery, reservation: Reservation
) -> ItemPage:
    store, owner = _store(service, response_id), owner_of(request.scope)
    try:
        try:
            page = await store.input_items(owner, response_id, query, MAX_INLINE_BODY)
        except StoredTooLargeError as error:
            size = error.size
            if size > query.max_bytes:
                raise unsupported(
                    f"an item of {size} bytes is too large to be listed; at most {query.max_bytes} are allowed "
                    "(--max-body)",
                    "after",
                ) from None
            reservation.grow(size)
            page = await store.input_items(owner, response_id, query, size)
    except UnknownItemError:
        raise malformed(f"{{param}}: {(query.after or '')[:100]!r} is not an item of this response", "after") from None
    if page is None:
        raise _not_found(response_id)
    return page


def _not_found(response_id: str, reason: str = "") -> ApiError:
    message = f"Response with id {response_id[:100]!r} not found{reason}."
    return ApiError(404, message, "response_id", "response_not_found")


def _response(found: StoredResponse) -> list[bytes]:
    """Return the parts of a response's JSON text."""
    fields = msgspec.json.decode(found.body, type=dict[str, Raw])
    fields.pop("output", None)
    return [msgspec.json.encode(fields)[:-1], b',"output":[', *_joined(found.output), b"]}"]


def _listed(page: ItemPage) -> list[bytes]:
    """Return the parts of the JSON text of a page."""
    first, last = (page.items[0].id, page.items[-1].id) if page.items else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": page.has_more}
    return [b'{"object":"list","data":[', *_joined(page.items), b"],", msgspec.json.encode(ends)[1:]]


def _joined(items: Sequence[StoredItem]) -> list[bytes]:
    """Return the bodies of items, separated by commas."""
    parts = [part for item in items for part in (b",", item.body)]
    return parts[1:]
