"""The routes of Anthropic's API: `POST /v1/messages` and its `count_tokens`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.messages.request import (
    BODY,
    COUNT_BODY,
    NAMES,
    parse_count_request,
    parse_message_request,
)
from tandem.frontend.api.messages.response import MessagesFormatter
from tandem.frontend.api.openapi import generates_anthropic, json_response, takes_anthropic
from tandem.frontend.api.request_scope import request_id, request_record
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, PromptTooLongError
from tandem.frontend.generation.generation import Generation
from tandem.frontend.request.schema import ID, closed

_BODY = BODY.schema()
_COUNT_BODY = COUNT_BODY.schema()
_COUNTED = closed({"input_tokens": ID})


def messages_router(service: Service) -> APIRouter:
    """Build the routes of `/v1/messages`."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=generates_anthropic(_BODY))
    async def messages(request: Request) -> Response:
        """Continue a conversation; Anthropic's interface."""
        ignored = service.ignored_fields(request)
        async with service.pending.receive(request, partial(parse_message_request, ignored=ignored)) as parsed:
            with _own_names():
                prompt = parsed.prompt
                admitted, shape = await service.chat.admit(
                    parsed.options,
                    prompt.conversation,
                    prompt.tool_use,
                    service.ready(),
                    ignored,
                    key_name(request.scope),
                )
        arrived = request_record(request.scope).arrived
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, arrived)
        formatter = MessagesFormatter(admitted, shape, parsed.hide_thinking, request_id(request.scope))
        return GenerationResponse(generation, formatter, service)

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=takes_anthropic(_COUNT_BODY, json_response("The number of tokens.", _COUNTED)),
    )
    async def count_tokens(request: Request) -> dict[str, int]:
        """Count the tokens of the prompt that a message with these fields would have."""
        ignored = service.ignored_fields(request)
        async with service.pending.receive(request, partial(parse_count_request, ignored=ignored)) as prompt:
            with _own_names():
                number = await service.count_tokens(prompt.model, prompt.conversation, ignored, key_name(request.scope))
        return {"input_tokens": number}

    return router


@contextmanager
def _own_names() -> Iterator[None]:
    """Raise the errors of a chat's admission with the field names of these routes.

    Claude Code shortens its conversation if an error has Anthropic's words for a long prompt.
    """
    try:
        yield
    except PromptTooLongError as error:
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum; send a shorter conversation"
        raise ApiError(400, message, "messages", error.code) from None
    except ApiError as error:
        raise error.renamed(NAMES) from None
