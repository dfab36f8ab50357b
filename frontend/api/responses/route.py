"""The route `POST /v1/responses`: stateless, so no response is stored or can be retrieved later."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.openapi import generates
from tandem.frontend.api.responses.openapi import RESPONSES
from tandem.frontend.api.responses.request import parse_responses
from tandem.frontend.api.responses.response import ResponsesFormatter
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.generation import Generation

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of a chat are called here."""


def responses_router(service: Service) -> APIRouter:
    """Build the route of `/v1/responses`."""
    router = APIRouter()
    parse = partial(parse_responses, default_max_tokens=service.config.chat.default_max_tokens)

    @router.post("/v1/responses", openapi_extra=generates(RESPONSES))
    async def responses(request: Request) -> Response:
        """Continue a conversation; OpenAI's newer interface, without its stored state."""
        arrived = monotonic()
        async with service.pending.receive(request, parse) as parsed:
            with _own_names():
                admitted, shape = await service.chat.admit(
                    parsed.options, parsed.conversation, parsed.tool_use, service.ready()
                )
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        return GenerationResponse(generation, ResponsesFormatter(admitted.model.name, shape, parsed.settings), service)

    return router


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors of a chat's admission name the fields as this route does."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error) from None


def _renamed(error: ApiError) -> ApiError:
    message, param = error.message, error.param
    for chat, own in _NAMES.items():
        message = message.replace(f"'{chat}", f"'{own}")
        if param is not None and (param == chat or param.startswith(chat + ".")):
            param = own + param.removeprefix(chat)
    return ApiError(error.status, message, param, error.code)
