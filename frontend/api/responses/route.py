"""The stateless route `POST /v1/responses`.

It stores no response, so none can be retrieved later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.openapi import generates
from tandem.frontend.api.responses.request import BODY, SAMPLED, parse_responses
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
"""Field of a chat to field of this route."""


def responses_router(service: Service) -> APIRouter:
    """Build the route of `/v1/responses`."""
    router = APIRouter()
    parse = partial(parse_responses, default_max_tokens=service.config.chat.default_max_tokens)

    @router.post("/v1/responses", openapi_extra=generates(BODY.schema()))
    async def responses(request: Request) -> Response:
        """Continue a conversation; OpenAI's newer interface, without its stored state."""
        arrived = monotonic()
        ignored = service.ignored_fields(request)
        async with service.pending.receive(request, partial(parse, ignored=ignored)) as parsed:
            with _own_names():
                admitted, shape = await service.chat.admit(
                    parsed.options, parsed.conversation, parsed.tool_use, service.ready()
                )
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        settings = parsed.settings | {name: getattr(admitted.sampling, name) for name in SAMPLED}
        return GenerationResponse(generation, ResponsesFormatter(admitted.model.name, shape, settings), service)

    return router


@contextmanager
def _own_names() -> Iterator[None]:
    """Raise the errors of a chat's admission with the field names of this route."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(_NAMES) from None
