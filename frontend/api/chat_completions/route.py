"""`POST /v1/chat/completions`."""

from functools import partial
from time import monotonic

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.chat_completions.response import ChatFormat
from tandem.frontend.api.formatter import EventFormat
from tandem.frontend.api.openapi import CHAT, generates
from tandem.frontend.api.reply import Reply, parse_body
from tandem.frontend.api.service import Service
from tandem.frontend.generation.generation import Generation


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()
    parse = partial(parse_chat, default_max_tokens=service.config.chat.default_max_tokens)

    @router.post("/v1/chat/completions", openapi_extra=generates(CHAT))
    async def chat_completions(request: Request) -> Response:
        """Continues a conversation."""
        arrived = monotonic()
        async with service.arrivals.request() as share:
            parsed = await parse_body(request, share, service, parse)
            admitted, shape = await service.chat.admit(
                parsed.options, parsed.conversation, parsed.tool_use, service.ready()
            )
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        formatter = EventFormat(admitted.model) if parsed.options.stream_events else ChatFormat(admitted, shape)
        return Reply(generation, formatter, service)

    return router
