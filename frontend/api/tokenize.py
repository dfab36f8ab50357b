"""The routes `POST /tokenize` and `POST /detokenize`: text to token ids and back."""

from functools import partial

import msgspec
from fastapi import APIRouter, Request
from msgspec import Raw, Struct
from starlette.responses import Response

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.openapi import json_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.generation.admission import MANY_IDS, check_ids
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.request.conversation import MESSAGES_FIELD, RENDERING_FIELDS, Conversation, conversation
from tandem.frontend.request.field_types import Boolean, Parsed, String
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.messages import parse_messages
from tandem.frontend.request.schema import ANY, ID, STRING, Schema, closed
from tandem.frontend.request.tools import chat_tool_use
from tandem.frontend.request.values import decode_exact, decode_field, wrong_type

MAX_TEXT_CHARS = 4 * 2**20
MAX_IDS_BYTES = 4 * 2**20
"""Maximum number of bytes of JSON of `tokens`: half a million ids of a large vocabulary."""


def _parse_text(raw: Raw, _: IgnoredFields) -> str:
    text = decode_field(raw, "prompt")
    if not isinstance(text, str):
        raise wrong_type("prompt", "a string", text)
    if len(text) > MAX_TEXT_CHARS:
        raise unsupported(f"{{param}} has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed", "prompt")
    return text


def _parse_ids(raw: Raw, _: IgnoredFields) -> list[int]:
    if (size := len(memoryview(raw))) > MAX_IDS_BYTES:
        raise unsupported(f"{{param}} has {size} bytes of JSON; at most {MAX_IDS_BYTES} are allowed", "tokens")
    ids: list[int] = decode_exact(raw, "tokens", list[int], "an array of token ids")
    return ids


_MODEL = Field("model", String())
_SHARED = (_MODEL, Field("add_special_tokens", Boolean(None)), Field("return_token_strs", Boolean()))
_TEXT = Field("prompt", Parsed(_parse_text, {"type": "string", "maxLength": MAX_TEXT_CHARS}), required=True)
_IDS = Field("tokens", Parsed(_parse_ids, {"type": "array", "items": ID}), required=True)

_TOKENIZE_TEXT = BodyFormat((_TEXT, *_SHARED))
_TOKENIZE_CHAT = BodyFormat((MESSAGES_FIELD, *_SHARED, *RENDERING_FIELDS))
_SOURCES = tuple(Field(name, Parsed(lambda raw, _: raw, ANY)) for name in ("prompt", "messages"))
_TOKENIZE = BodyFormat((*_SOURCES, *_SHARED, *RENDERING_FIELDS))
_DETOKENIZE = BodyFormat((_IDS, _MODEL, Field("skip_special_tokens", Boolean())))

TOKENIZE: Schema = {"anyOf": [_TOKENIZE_TEXT.schema(), _TOKENIZE_CHAT.schema()]}
DETOKENIZE = _DETOKENIZE.schema()
TOKENIZED = closed(
    {"count": ID, "max_model_len": ID, "tokens": {"type": "array", "items": ID}},
    {"token_strs": {"type": "array", "items": STRING}},
)
DETOKENIZED = closed({"prompt": STRING})


class TokenizeRequest(Struct, frozen=True):
    """Validated request to tokenize text or a conversation.

    A conversation is rendered first.

    """

    model: str | None
    source: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


class DetokenizeRequest(Struct, frozen=True):
    """Validated request to decode token ids."""

    model: str | None
    tokens: list[int]
    skip_special_tokens: bool


def parse_tokenize(body: bytes, ignored: IgnoredFields) -> TokenizeRequest:
    """Parse the body of `/tokenize`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    values = _TOKENIZE.read(body, ignored)
    text, messages = values["prompt"], values["messages"]
    if (text is None) == (messages is None):
        raise malformed("give either {param}, a text, or 'messages', a conversation", "prompt")
    source: str | Conversation
    if text is None:
        source = conversation({**values, "messages": parse_messages(messages, ignored)}, chat_tool_use(values))
    else:
        source = _parse_text(text, ignored)
    special = values["add_special_tokens"]
    return TokenizeRequest(
        model=values["model"],
        source=source,
        # A rendered conversation already contains its special tokens.
        add_special_tokens=text is not None if special is None else special,
        return_token_strs=values["return_token_strs"],
    )


def parse_detokenize(body: bytes, ignored: IgnoredFields) -> DetokenizeRequest:
    """Parse the body of `/detokenize`.

    Raises ApiError 400 if it is malformed, and for a value out of range or not supported.
    """
    values = _DETOKENIZE.read(body, ignored)
    return DetokenizeRequest(values["model"], values["tokens"], values["skip_special_tokens"])


class Tokenized(Struct, frozen=True, omit_defaults=True):
    """The body of a response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    """The body of a response of `/detokenize`."""

    prompt: str


def tokenize_router(service: Service) -> APIRouter:
    """Build the routes `/tokenize` and `/detokenize`."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=takes(TOKENIZE, json_response("The token ids.", TOKENIZED)))
    async def tokenize(request: Request) -> Response:
        """Encode a text or a rendered conversation as token ids."""
        ignored = service.ignored_fields(request)
        async with service.pending.receive(request, partial(parse_tokenize, ignored=ignored)) as parsed:
            model = service.admission.named(parsed.model, service.ready().model)
            source = parsed.source
            text = (
                source
                if isinstance(source, str)
                else await service.chat.render(source, ignored, key_name(request.scope))
            )
            ids = await service.tokenizer.encode(text, parsed.add_special_tokens)
        arguments = (service.tokenizer, ids, model.max_len, parsed.return_token_strs)
        if len(ids) <= MANY_IDS:
            return _tokenized(*arguments)
        return await service.parser.run(_tokenized, *arguments)

    @router.post("/detokenize", openapi_extra=takes(DETOKENIZE, json_response("The text.", DETOKENIZED)))
    async def detokenize(request: Request) -> Response:
        """Decode token ids, including special tokens unless they are to be skipped."""
        parse = partial(parse_detokenize, ignored=service.ignored_fields(request))
        async with service.pending.receive(request, parse) as parsed:
            model = service.admission.named(parsed.model, service.ready().model)
            check_ids(parsed.tokens, model.vocab_size, "tokens")
            text = await service.tokenizer.decode_many(parsed.tokens, parsed.skip_special_tokens)
        return _json_response(Detokenized(text))

    return router


def _tokenized(tokenizer: Tokenizer, ids: list[int], max_len: int, with_names: bool) -> Response:
    names = tokenizer.names(ids) if with_names else None
    return _json_response(Tokenized(len(ids), max_len, ids, names))


def _json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
