"""Tokenizer of the model, loaded from the `tokenizer.json` of its directory."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

import tokenizers

from tandem.frontend.generation.detokenizer import AnyDetokenizer, ByteDetokenizer, Detokenizer, TagDetokenizer
from tandem.frontend.generation.output_tags import TagToken
from tandem.frontend.generation.token_bytes import DecodedBytes, TokenBytes, is_byte_level, token_bytes
from tandem.frontend.special_tokens import SpecialTokenGuard, guarded_tokens
from tandem.frontend.workers import Workers

SHORT_TEXT_CHARS = 256
"""Maximum characters encoded in the event loop: a thread would cost more than the encoding."""


class TokenizerError(Exception):
    """The model directory has no usable tokenizer; the message has a remedy."""


class Tokenizer:
    """Tokenizer of the model, with its fingerprint.

    It wraps a `tokenizers.Tokenizer`, with threads for texts that would block the event loop.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        fingerprint: str,
        workers: Workers,
        guard: SpecialTokenGuard | None = None,
        encoder: tokenizers.Tokenizer | None = None,
    ) -> None:
        """Initialize with a tokenizer.

        With a `guard`, all text is encoded by its `encoder`, in which special tokens have random names.
        """
        self._raw = raw
        self._encoder = raw if encoder is None else encoder
        self.guard = guard
        self.fingerprint = fingerprint
        self._workers = workers
        self._anchor = _anchor(raw)
        self._decoded = [DecodedBytes(raw, skip_special) for skip_special in (False, True)]
        """Lookups of bytes with and without special tokens."""
        self._is_byte_level = is_byte_level(raw)
        self._longest = max((len(token) for token in self._encoder.get_vocab()), default=1)

    @property
    def vocab_size(self) -> int:
        return self._raw.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry; None if it is unknown."""
        return self._raw.token_to_id(token)

    @cached_property
    def leading_ids(self) -> list[int]:
        """Ids that the tokenizer prepends to text, such as BOS."""
        whole, alone = self._encode("a", True), self._encode("a", False)
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(alone)] == alone), [])

    @cached_property
    def bytes_of(self) -> TokenBytes:
        """Lookup of the bytes of a token id."""
        return token_bytes(self._raw)

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of the special tokens by name.

        Plain text is never encoded to them.
        """
        added = self._raw.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def tag_tokens(self, texts: Iterable[str]) -> dict[int, TagToken]:
        """Return the tokens with these texts, by id.

        They are added tokens, special or not: other vocabulary entries are one of several spellings of a text.
        """
        wanted = set(texts)
        added = self._raw.get_added_tokens_decoder()
        return {
            token_id: TagToken(token.content, token.special)
            for token_id, token in added.items()
            if token.content in wanted
        }

    def detokenizer(
        self, skip_special_tokens: bool = True, tags: Mapping[int, TagToken] = MappingProxyType({})
    ) -> AnyDetokenizer:
        """Create an incremental decoder for one sequence.

        tags: tokens with text in the output even if special tokens are skipped.
        """
        new = partial(self._text_detokenizer, skip_special_tokens)
        return TagDetokenizer(new, tags) if tags else new()

    def _text_detokenizer(self, skip_special_tokens: bool) -> Detokenizer | ByteDetokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._decoded[skip_special_tokens])
        return Detokenizer(self._raw, self._anchor, skip_special_tokens)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a prompt.

        add_special_tokens: add tokens such as BOS. With a guard the special tokens in text are those that it sealed;
        others are text.
        """
        if len(text) <= SHORT_TEXT_CHARS:
            return self._encode(text, add_special_tokens)
        return await self._workers.run(self._encode, text, add_special_tokens)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text, without encoding it."""
        return len(text) // self._longest

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text."""
        (text,) = self._raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    async def decode_many(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode any number of ids in a thread."""
        return await self._workers.run(self.decode, ids, skip_special_tokens)

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary entries of these ids; empty for ids that it lacks."""
        return [self._raw.id_to_token(token_id) or "" for token_id in ids]

    def close(self) -> None:
        self._workers.close()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Encoding a single text holds the GIL until it ends; batch encoding releases it.
        (encoded,) = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids


def _anchor(raw: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids to decode before an output to keep its leading space.

    Empty if it is kept anyway. SentencePiece-style decoders drop the leading space of a text, which belongs to the
    output of a completion. Prompt ids cannot be used, as they may end within a UTF-8 character.
    """
    ids: list[int] = raw.encode("a a", add_special_tokens=False).ids
    first, rest = ids[:1], ids[1:]
    whole, alone = raw.decode(ids), raw.decode(rest)
    return () if raw.decode(first) + alone == whole else tuple(first)


def load_tokenizer(model_dir: Path, threads: int = 2, no_special_tokens_in_text: bool = False) -> Tokenizer:
    """Load `model_dir/tokenizer.json`.

    With `no_special_tokens_in_text` special tokens are encoded only in texts sealed by its guard. Raises TokenizerError
    if the file is missing or unreadable.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{model_dir} has no tokenizer.json; download it to where the weights are, or write that of the model that "
            f"this one was trained from: AutoTokenizer.from_pretrained(NAME).save_pretrained({str(model_dir)!r})"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    try:
        raw = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises plain Exception for invalid files
        raise TokenizerError(f"{path} ({len(data)} bytes) cannot be read: {error}") from error
    guard = SpecialTokenGuard(guarded_tokens(raw)) if no_special_tokens_in_text else None
    try:
        encoder = raw if guard is None else guard.encoder(data)
    except Exception as error:  # as above, if special tokens cannot be renamed
        raise TokenizerError(f"{path} cannot be used with --no-special-tokens-in-text: {error}") from error
    for each in (raw, encoder):
        each.no_truncation()
        each.no_padding()
    return Tokenizer(raw, hashlib.sha256(data).hexdigest(), Workers(threads, "tokenize"), guard, encoder)
