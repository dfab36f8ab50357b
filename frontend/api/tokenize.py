"""`POST /tokenize` and `POST /detokenize`: what the model sees of a text, and back."""

from fastapi import APIRouter, Request
from msgspec import Struct
from starlette.responses import Response

from tandem.frontend.api.openapi import json_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.generation.admission import MANY_IDS, check_ids, check_model
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.routes.intake import encoded, parse_body
from tandem.frontend.schemas.openapi_tokenize import DETOKENIZE, DETOKENIZED, TOKENIZE, TOKENIZED
from tandem.frontend.schemas.tokenize import parse_detokenize, parse_tokenize


class Tokenized(Struct, frozen=True, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    prompt: str


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=takes(TOKENIZE, json_response("Its tokens.", TOKENIZED)))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of a rendered conversation."""
        async with service.arrivals.request() as share:
            parsed = await parse_body(request, share, service, parse_tokenize)
            model = service.ready().model
            check_model(parsed.model or model.name, model)
            text = parsed.source if isinstance(parsed.source, str) else await service.chat.render(parsed.source)
            ids = await service.tokenizer.encode(text, parsed.add_special_tokens)
        answer = (service.tokenizer, ids, model.max_len, parsed.return_token_strs)
        return _tokenized(*answer) if len(ids) <= MANY_IDS else await service.parser.run(_tokenized, *answer)

    @router.post("/detokenize", openapi_extra=takes(DETOKENIZE, json_response("Their text.", DETOKENIZED)))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included unless they are to be skipped."""
        async with service.arrivals.request() as share:
            parsed = await parse_body(request, share, service, parse_detokenize)
            model = service.ready().model
            check_model(parsed.model or model.name, model)
            check_ids(parsed.tokens, model.vocab_size, "tokens")
            text = await service.tokenizer.decode_many(parsed.tokens, parsed.skip_special_tokens)
        return encoded(Detokenized(text))

    return router


def _tokenized(tokenizer: Tokenizer, ids: list[int], max_len: int, with_names: bool) -> Response:
    names = tokenizer.names(ids) if with_names else None
    return encoded(Tokenized(len(ids), max_len, ids, names))
