"""`POST /v1/chat/completions`."""

from functools import partial
from time import monotonic

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.formats.chat import ChatFormat
from frontend.formats.events import EventFormat
from frontend.generation import Generation
from frontend.reply import Reply
from frontend.routes.intake import parse_body
from frontend.schemas.chat import parse_chat
from frontend.schemas.openapi import CHAT, generates
from frontend.service import Service


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
