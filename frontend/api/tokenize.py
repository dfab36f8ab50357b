"""The routes `POST /tokenize` and `POST /detokenize`: text to token ids and back."""

import msgspec
from fastapi import APIRouter, Request
from msgspec import Raw, Struct
from starlette.responses import Response

from tandem.frontend.api.openapi import BOOLEAN, CHAT, ID, MESSAGE, STRING, Schema, array, closed, json_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.generation.admission import MANY_IDS, check_ids, check_model
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.request.conversation import CONVERSATION_NAMES, Conversation, read_conversation
from tandem.frontend.request.fields import BodyFormat, FieldReader, decode_field, wrong_type
from tandem.frontend.request.messages import MAX_MESSAGES
from tandem.frontend.request.tools import read_tool_use

MAX_TEXT_CHARS = 4 * 2**20
MAX_IDS_BYTES = 4 * 2**20
"""Most bytes of JSON of `tokens`: half a million ids of a large vocabulary."""

_MODEL: Schema = {"type": ["string", "null"]}
_SHARED: dict[str, Schema] = {"model": _MODEL, "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN}
_CONVERSATION = (
    *("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message"),
    *("chat_template_kwargs", "reasoning_effort"),
)

TOKENIZE: Schema = {
    "anyOf": [
        closed({"prompt": {"type": "string", "maxLength": MAX_TEXT_CHARS}}, _SHARED),
        closed(
            {"messages": array(MESSAGE, MAX_MESSAGES, 1)},
            {**_SHARED, **{name: CHAT["properties"][name] for name in _CONVERSATION}},
        ),
    ]
}
TOKENIZED = closed(
    {"count": ID, "max_model_len": ID, "tokens": {"type": "array", "items": ID}},
    {"token_strs": {"type": "array", "items": STRING}},
)
DETOKENIZE = closed({"tokens": {"type": "array", "items": ID}}, {"model": _MODEL, "skip_special_tokens": BOOLEAN})
DETOKENIZED = closed({"prompt": STRING})


class TokenizeRequest(Struct, frozen=True):
    """A validated request to tokenize a text, or a conversation that is rendered first."""

    model: str | None
    source: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


class DetokenizeRequest(Struct, frozen=True):
    """A validated request for the text of token ids."""

    model: str | None
    tokens: list[int]
    skip_special_tokens: bool


_TOKENIZE = BodyFormat((*CONVERSATION_NAMES, "model", "prompt", "add_special_tokens", "return_token_strs"))
_DETOKENIZE = BodyFormat(("model", "tokens", "skip_special_tokens"))


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parse the body of `/tokenize`.

    Raises ApiError 400 if it is malformed, 422 for a value out of range or not supported.
    """
    fields = FieldReader(_TOKENIZE.split(body))
    source: str | Conversation
    text, messages = _raw(fields, "prompt"), _raw(fields, "messages")
    if (text is None) == (messages is None):
        raise malformed("give either 'prompt', a text, or 'messages', a conversation", "prompt")
    source = read_conversation(fields, read_tool_use(fields)) if text is None else _text(text)
    request = TokenizeRequest(
        model=_model(fields),
        source=source,
        # A rendered conversation holds its special tokens already.
        add_special_tokens=fields.boolean("add_special_tokens", text is not None),
        return_token_strs=fields.boolean("return_token_strs", False),
    )
    fields.finish()
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parse the body of `/detokenize`.

    Raises ApiError 400 if it is malformed, 422 for a value out of range or not supported.
    """
    fields = FieldReader(_DETOKENIZE.split(body))
    raw = _raw(fields, "tokens")
    if raw is None:
        raise malformed("the field 'tokens' is required", "tokens")
    request = DetokenizeRequest(_model(fields), _ids(raw), fields.boolean("skip_special_tokens", False))
    fields.finish()
    return request


def _raw(fields: FieldReader, name: str) -> Raw | None:
    raw = fields.raw(name)
    return None if raw is None or bytes(memoryview(raw)[:4]) == b"null" else raw


def _model(fields: FieldReader) -> str | None:
    value = fields.take("model")
    if value is not None and not isinstance(value, str):
        raise wrong_type("model", "a string", value)
    return value


def _text(raw: Raw) -> str:
    try:
        text: str = decode_field(raw, "prompt", str)
    except msgspec.ValidationError:
        raise malformed("'prompt' must be a string", "prompt") from None
    if len(text) > MAX_TEXT_CHARS:
        raise unsupported(f"'prompt' has {len(text)} characters, at most {MAX_TEXT_CHARS}", "prompt")
    return text


def _ids(raw: Raw) -> list[int]:
    if (size := len(memoryview(raw))) > MAX_IDS_BYTES:
        raise unsupported(f"'tokens' has {size} bytes of JSON, at most {MAX_IDS_BYTES}", "tokens")
    try:
        ids: list[int] = decode_field(raw, "tokens", list[int])
    except msgspec.ValidationError as error:
        raise malformed(f"'tokens' must be an array of token ids: {error}", "tokens") from None
    return ids


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
        async with service.pending.receive(request, parse_tokenize) as parsed:
            model = service.ready().model
            check_model(parsed.model or model.name, model)
            text = parsed.source if isinstance(parsed.source, str) else await service.chat.render(parsed.source)
            ids = await service.tokenizer.encode(text, parsed.add_special_tokens)
        arguments = (service.tokenizer, ids, model.max_len, parsed.return_token_strs)
        if len(ids) <= MANY_IDS:
            return _tokenized(*arguments)
        return await service.parser.run(_tokenized, *arguments)

    @router.post("/detokenize", openapi_extra=takes(DETOKENIZE, json_response("The text.", DETOKENIZED)))
    async def detokenize(request: Request) -> Response:
        """Decode token ids, including special tokens unless they are to be skipped."""
        async with service.pending.receive(request, parse_detokenize) as parsed:
            model = service.ready().model
            check_model(parsed.model or model.name, model)
            check_ids(parsed.tokens, model.vocab_size, "tokens")
            text = await service.tokenizer.decode_many(parsed.tokens, parsed.skip_special_tokens)
        return _json_response(Detokenized(text))

    return router


def _tokenized(tokenizer: Tokenizer, ids: list[int], max_len: int, with_names: bool) -> Response:
    names = tokenizer.names(ids) if with_names else None
    return _json_response(Tokenized(len(ids), max_len, ids, names))


def _json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
