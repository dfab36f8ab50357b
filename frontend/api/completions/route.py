"""`POST /v1/completions`."""

from time import monotonic

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.api.completions.response import CompletionFormat
from tandem.frontend.api.formatter import EventFormat
from tandem.frontend.api.openapi import COMPLETION, generates
from tandem.frontend.api.reply import Reply, parse_body
from tandem.frontend.api.service import Service
from tandem.frontend.generation.generation import Generation


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=generates(COMPLETION))
    async def completions(request: Request) -> Response:
        """Continues a prompt."""
        arrived = monotonic()
        async with service.arrivals.request() as share:
            parsed = await parse_body(request, share, service, parse_completion)
            # Where a token begins is told in characters from the beginning of the prompt.
            with_text = parsed.echo or parsed.options.logprobs is not None
            admitted = await service.admission.admit(
                parsed.options, parsed.prompts, service.ready(), with_text=with_text
            )
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        events = parsed.options.stream_events
        formatter = EventFormat(admitted.model) if events else CompletionFormat(admitted, parsed.echo)
        return Reply(generation, formatter, service)

    return router
