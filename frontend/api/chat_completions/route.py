"""The route `POST /v1/chat/completions`."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.chat_completions.request import BODY, parse_chat
from tandem.frontend.api.chat_completions.response import ChatFormatter
from tandem.frontend.api.formatter import EventFormatter
from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.openapi import generates
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.api.service import Service
from tandem.frontend.generation.generation import Generation

_BODY = BODY.schema()


def chat_router(service: Service) -> APIRouter:
    """Build the route of `/v1/chat/completions`."""
    router = APIRouter()
    parse = partial(parse_chat, default_max_tokens=service.config.chat.default_max_tokens)

    @router.post("/v1/chat/completions", openapi_extra=generates(_BODY))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        ignored = service.ignored_fields(request)
        async with service.pending.receive(request, partial(parse, ignored=ignored)) as parsed:
            admitted, shape = await service.chat.admit(
                parsed.options,
                parsed.conversation,
                parsed.tool_use,
                service.ready(),
                ignored,
                key_name(request.scope),
            )
        arrived = request_record(request.scope).arrived
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        formatter = EventFormatter(admitted.model) if parsed.options.stream_events else ChatFormatter(admitted, shape)
        return GenerationResponse(generation, formatter, service)

    return router
