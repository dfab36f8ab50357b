"""The route `POST /v1/responses`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.byte_budget import MAX_INLINE_BODY
from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.openapi import generates, json_response, takes
from tandem.frontend.api.owner import owner_of
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.api.responses.context import Context, ContextLoader
from tandem.frontend.api.responses.input_items import InputItem, stored_item
from tandem.frontend.api.responses.request import BODY, SAMPLED, ResponsesRequest, parse_responses
from tandem.frontend.api.responses.response import ResponsesFormatter
from tandem.frontend.api.responses.stored_generation import ResponseRecord, StoredGenerationResponse
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.generation import Generation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import ID, closed
from tandem.frontend.store.store import StoredItem

_BODY = BODY.schema()
_COUNTED = closed({"object": {"const": "response.input_tokens"}, "input_tokens": ID})
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Maps field names of chats to the ones of this route."""


def responses_router(service: Service) -> APIRouter:
    """Build the route of `/v1/responses`."""
    router = APIRouter()
    default_max_tokens = service.config.chat.default_max_tokens
    loader = ContextLoader(service.store, service.parser, service.config.max_body)

    def parse(body: bytes, ignored: IgnoredFields) -> tuple[ResponsesRequest, int]:
        return parse_responses(body, default_max_tokens, ignored), len(body)

    @router.post("/v1/responses", openapi_extra=generates(_BODY))
    async def responses(request: Request) -> Response:
        """Continue a conversation; OpenAI's newer interface, with stored responses."""
        ignored = service.ignored_fields(request, {"response_format.json_schema": "text.format"})
        owner = owner_of(request.scope)
        async with service.pending.receive(request, partial(parse, ignored=ignored)) as (given, size):
            with service.body_budget.reservation(owner) as reservation, _own_names():
                context = await loader.load(owner, given, size, reservation, ignored)
                parsed = context.request
                admitted, shape = await service.chat.admit(
                    parsed.options,
                    parsed.conversation(context.items),
                    parsed.tool_use,
                    service.ready(),
                    ignored,
                    key_name(request.scope),
                )
        arrived = request_record(request.scope).arrived
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        settings = parsed.settings | {name: getattr(admitted.sampling, name) for name in SAMPLED}
        formatter = ResponsesFormatter(
            admitted.model.name, shape, settings, parsed.tools.names, parsed.carries_reasoning
        )
        record = await _record(service, owner, context, size)
        if record is None:
            return GenerationResponse(generation, formatter, service)
        formatter.is_stored = True
        return StoredGenerationResponse(generation, formatter, service, record)

    @router.post(
        "/v1/responses/input_tokens",
        openapi_extra=takes(_BODY, json_response("The number of tokens.", _COUNTED)),
    )
    async def input_tokens(request: Request) -> dict[str, Any]:
        """Count the tokens of the prompt that a response with these fields would have."""
        ignored = service.ignored_fields(request)
        owner = owner_of(request.scope)
        async with service.pending.receive(request, partial(parse, ignored=ignored)) as (given, size):
            with service.body_budget.reservation(owner) as reservation, _own_names():
                context = await loader.load(owner, given, size, reservation, ignored)
                conversation = context.request.conversation(context.items)
                number = await service.count_tokens(given.options.model, conversation, ignored, key_name(request.scope))
        return {"object": "response.input_tokens", "input_tokens": number}

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        """Refuse to shorten a conversation."""
        message = "conversations are not compacted by this server; begin a new one with a summary of the old"
        raise ApiError(404, message, None, "unknown_url")

    return router


async def _record(service: Service, owner: str, context: Context, size: int) -> ResponseRecord | None:
    """Return a record for storing the response to a request of `size` bytes; None if `store` is false.

    Raises ApiError 429 if too many large inputs wait to be stored.
    """
    if service.store is None or not context.request.store:
        return None
    kept = [item for item in context.own if item.is_kept]
    if context.size <= MAX_INLINE_BODY:
        given = _stored_items(kept)
    else:
        given = await service.parser.run(_stored_items, kept)
    reservation = service.stored_budget.reservation(owner)
    # The response echoes settings of the request.
    reservation.grow(max(size, sum([len(item.body) for item in given])))
    return ResponseRecord(service.store, owner, given, context.request.previous_response_id, reservation)


def _stored_items(items: Sequence[InputItem]) -> list[StoredItem]:
    return [stored_item(item) for item in items]


@contextmanager
def _own_names() -> Iterator[None]:
    """Rename the fields in errors of chat admission to the ones of this route."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(_NAMES) from None
