"""Bytes of tokens, for byte-level and SentencePiece vocabularies."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.generation.token_bytes import token_bytes
from tests.fakes.tokenizer import BEGIN, END, byte_level_tokenizer, sentence_piece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()


@given(st.text())
def test_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    spell = token_bytes(BYTE_LEVEL)
    assert b"".join([spell(token_id) for token_id in BYTE_LEVEL.encode(text).ids]) == text.encode()


@given(st.text(st.characters(codec="utf-8", exclude_characters="▁")))
def test_bytes_of_sentence_piece_tokens_join_to_the_text(text: str) -> None:
    spell = token_bytes(SENTENCE_PIECE)
    spelled = b"".join([spell(token_id) for token_id in SENTENCE_PIECE.encode(text).ids])
    assert spelled == (b" " + text.encode() if text else b"")


def test_every_byte_is_a_token() -> None:
    for raw in (BYTE_LEVEL, SENTENCE_PIECE):
        spell = token_bytes(raw)
        spelled = {spell(token_id) for token_id in range(raw.get_vocab_size())}
        assert {bytes([byte]) for byte in range(256)} <= spelled


def test_added_tokens_are_their_own_bytes() -> None:
    spell = token_bytes(BYTE_LEVEL)
    for name in (BEGIN, END):
        assert spell(BYTE_LEVEL.token_to_id(name)) == name.encode()


@pytest.mark.parametrize("raw", [BYTE_LEVEL, SENTENCE_PIECE])
def test_an_id_of_the_padding_has_no_bytes(raw: tokenizers.Tokenizer) -> None:
    assert token_bytes(raw)(raw.get_vocab_size() + 5) == b""


def test_a_token_that_resembles_a_byte_is_text() -> None:
    raw = sentence_piece_tokenizer()
    raw.add_tokens(["<0xZZ>", "<0x41"])
    spell = token_bytes(raw)
    assert spell(raw.token_to_id("<0xZZ>")) == b"<0xZZ>"
    assert spell(raw.token_to_id("<0x41")) == b"<0x41"
    assert spell(raw.token_to_id("<0x41>")) == b"A"


def test_tokens_of_a_tokenizer_without_decoder_are_their_own_text() -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"ab": 0, "▁c": 1}, unk_token="ab"))
    assert [token_bytes(raw)(token_id) for token_id in (0, 1)] == [b"ab", b" c"]
