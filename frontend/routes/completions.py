"""`POST /v1/completions`."""

from time import monotonic
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from frontend.admission import admit
from frontend.body import SMALL_BODY, read_body
from frontend.generation import Generation
from frontend.reply import CompletionReply
from frontend.schemas.completion import CompletionRequest, parse_completion
from frontend.service import Service

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["model", "prompt"],
                    "properties": {
                        "model": {"type": "string"},
                        "prompt": {
                            "oneOf": [
                                {"type": "string"},
                                {"type": "array", "items": {"type": "string"}},
                                {"type": "array", "items": {"type": "integer"}},
                                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                            ]
                        },
                        "max_tokens": {"type": "integer", "minimum": 0, "default": 16},
                        "n": {"type": "integer", "minimum": 1, "maximum": 128, "default": 1},
                        "stream": {"type": "boolean", "default": False},
                        "temperature": {"type": "number", "minimum": 0, "maximum": 2, "default": 1},
                    },
                }
            }
        },
    }
}


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=_BODY)
    async def completions(request: Request) -> Response:
        """Continues a prompt."""
        arrived = monotonic()
        with service.bodies.share() as share:
            parsed = await _parse(await read_body(request, service.config.max_body, share), service)
            admitted = await admit(
                parsed, service.ready(), service.tokenizer, service.parser, service.config.max_concurrent
            )
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        return CompletionReply(generation, service)

    return router


async def _parse(body: bytes, service: Service) -> CompletionRequest:
    """For a small body a thread would cost more than it saves."""
    if len(body) <= SMALL_BODY:
        return parse_completion(body)
    return await service.parser.run(parse_completion, body)
