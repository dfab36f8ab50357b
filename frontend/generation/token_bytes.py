"""Lookup of the bytes of a token id.

A token may be a fragment of a character, which text cannot represent.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import tokenizers

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character for a space in SentencePiece vocabularies."""


class TokenBytes:
    """Cached lookup of the bytes of a token id."""

    def __init__(self, raw: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes], added: dict[int, bytes]) -> None:
        """Initialize the lookup.

        to_bytes: decodes a vocabulary entry. added: bytes of the added tokens by id.
        """
        self._raw = raw
        self._to_bytes = to_bytes
        self._known = added

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of an id; empty if it is unknown.

        A model's vocabulary may be padded with ids that its tokenizer lacks.
        """
        found = self._known.get(token_id)
        if found is None:
            token = self._raw.id_to_token(token_id)
            found = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return found


class DecodedBytes(dict[int, bytes]):
    """Bytes of each id in a byte-level decoder, looked up once.

    The concatenated bytes of a sequence are its text in UTF-8, with U+FFFD for invalid bytes. Added tokens whose
    characters all represent bytes are decoded like other vocabulary entries.
    """

    def __init__(self, raw: tokenizers.Tokenizer, skip_special: bool) -> None:
        super().__init__()
        self._raw = raw
        added = raw.get_added_tokens_decoder().values()
        self._skipped = {token.content for token in added if token.special and skip_special}

    def __missing__(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id)
        found = self[token_id] = b"" if token is None or token in self._skipped else _byte_level(token)
        return found


def is_byte_level(raw: tokenizers.Tokenizer) -> bool:
    """Return True if the text of ids is the concatenation of their bytes.

    This is the case if the decoder does nothing else.
    """
    if raw.decoder is None:
        return False
    decoder = msgspec.json.decode(raw.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts] == ["ByteLevel"]


def token_bytes(raw: tokenizers.Tokenizer) -> TokenBytes:
    """Build the lookup of token bytes for a tokenizer.

    Its vocabulary is byte-level or SentencePiece-style, with or without byte fallback.
    """
    added = {token_id: token.content.encode() for token_id, token in raw.get_added_tokens_decoder().items()}
    byte_level = raw.decoder is not None and "ByteLevel" in _kinds(msgspec.json.decode(raw.decoder.__getstate__()))
    return TokenBytes(raw, _byte_level if byte_level else _sentence_piece, added)


def _kinds(decoder: dict[str, Any]) -> set[str]:
    return {decoder["type"]}.union(*[_kinds(part) for part in decoder.get("decoders", ())])


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies.

    The mapping is from Radford et al. (2019): printable Latin-1 characters represent themselves; the other bytes are
    mapped to U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(SPACE, " ").encode()
