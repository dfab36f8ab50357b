"""The route `POST /v1/completions`."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.completions.request import BODY, parse_completion
from tandem.frontend.api.completions.response import CompletionFormatter
from tandem.frontend.api.formatter import EventFormatter
from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.openapi import generates
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.api.service import Service
from tandem.frontend.generation.generation import Generation

_BODY = BODY.schema()


def completions_router(service: Service) -> APIRouter:
    """Build the route of `/v1/completions`."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=generates(_BODY))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        ignored = service.ignored_fields(request)
        parse = partial(parse_completion, ignored=ignored)
        async with service.pending.receive(request, parse) as parsed:
            # `text_offset` counts characters from the beginning of the prompt.
            with_text = parsed.echo or parsed.options.logprobs is not None
            admitted = await service.admission.admit(
                parsed.options,
                parsed.prompts,
                service.ready(),
                add_special_tokens=parsed.add_special_tokens,
                ignored=ignored,
                client=key_name(request.scope),
                with_text=with_text,
            )
        arrived = request_record(request.scope).arrived
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        events = parsed.options.stream_events
        formatter = EventFormatter(admitted.model) if events else CompletionFormatter(admitted, parsed.echo)
        return GenerationResponse(generation, formatter, service)

    return router
