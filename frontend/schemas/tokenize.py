"""The bodies of `POST /tokenize` and `POST /detokenize`."""

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.api.chat_completions.request import CONVERSATION_NAMES, Conversation, read_conversation
from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.fields import BodyFormat, FieldReader, decode_field, wrong_type
from tandem.frontend.request.tools import read_tool_use

MAX_TEXT_CHARS = 4 * 2**20
MAX_IDS_BYTES = 4 * 2**20
"""Of JSON: half a million ids of large vocabularies."""


class TokenizeRequest(Struct, frozen=True):
    """A text, or a conversation to be rendered first."""

    model: str | None
    source: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


class DetokenizeRequest(Struct, frozen=True):
    model: str | None
    tokens: list[int]
    skip_special_tokens: bool


_TOKENIZE = BodyFormat((*CONVERSATION_NAMES, "model", "prompt", "add_special_tokens", "return_token_strs"))
_DETOKENIZE = BodyFormat(("model", "tokens", "skip_special_tokens"))


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
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
    """Raises ApiError 400 for what is malformed, 422 for what is out of range or not supported."""
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
