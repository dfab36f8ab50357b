"""Incremental decoding equals the decoding of all ids at once, for any ids."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from tandem.frontend.generation.detokenizer import MAX_HELD_IDS, AnyDetokenizer, ByteDetokenizer, Detokenizer
from tandem.frontend.generation.token_bytes import DecodedBytes, is_byte_level
from tandem.frontend.generation.tokenizer import _anchor
from tests.fakes.tokenizer import byte_level_tokenizer, sentence_piece_tokenizer

BPE = byte_level_tokenizer()
PIECES = sentence_piece_tokenizer()


def stream(raw: tokenizers.Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(raw, _anchor(raw), skip_special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300)
@given(st.lists(st.integers(0, BPE.get_vocab_size() - 1), max_size=120))
def test_random_ids_decode_as_a_whole(ids: list[int]) -> None:
    assert "".join(stream(BPE, ids)) == BPE.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, BPE.get_vocab_size() - 1), max_size=120))
def test_random_ids_decode_as_a_whole_with_special_tokens(ids: list[int]) -> None:
    assert "".join(stream(BPE, ids, skip_special=False)) == BPE.decode(ids, skip_special_tokens=False)


BYTES = [BPE.encode(text, add_special_tokens=False).ids for text in ("é", "你", "🙂")]
SINGLE_BYTES = sorted({token_id for ids in BYTES for token_id in ids} | set(range(2, 258)))


@settings(max_examples=300)
@given(st.lists(st.sampled_from(SINGLE_BYTES), max_size=160))
def test_random_bytes_decode_as_a_whole(ids: list[int]) -> None:
    assert "".join(stream(BPE, ids)) == BPE.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_any_text_round_trips(text: str) -> None:
    ids = BPE.encode(text, add_special_tokens=False).ids
    assert "".join(stream(BPE, ids)) == BPE.decode(ids, skip_special_tokens=True) == text


def test_a_split_character_is_held_back_until_complete() -> None:
    ids = BPE.encode("日本語 👩‍🚀!", add_special_tokens=False).ids
    parts = stream(BPE, ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert "".join(parts) == "日本語 👩‍🚀!"


def test_an_incomplete_last_character_becomes_the_replacement() -> None:
    ids = BPE.encode("ok 日", add_special_tokens=False).ids[:-1]
    assert "".join(stream(BPE, ids)) == BPE.decode(ids) == "ok \N{REPLACEMENT CHARACTER}"


def test_endless_invalid_bytes_are_flushed_in_bounded_time() -> None:
    lone_byte = BPE.encode("日", add_special_tokens=False).ids[-1]
    detokenizer = Detokenizer(BPE)
    parts = [detokenizer.push(lone_byte) for _ in range(500)]
    assert len(detokenizer._held) <= MAX_HELD_IDS
    assert "".join(parts) + detokenizer.flush() == BPE.decode([lone_byte] * 500)


def test_special_tokens_are_skipped_even_inside_a_character() -> None:
    first, *rest = BPE.encode("日", add_special_tokens=False).ids
    ids = [first, BPE.token_to_id("<|end|>"), *rest]
    assert "".join(stream(BPE, ids)) == "日"


def test_endless_special_tokens_have_no_text() -> None:
    assert "".join(stream(BPE, [0, 1] * 200)) == ""


def test_only_sentence_piece_tokenizers_need_an_anchor() -> None:
    assert _anchor(BPE) == ()
    assert len(_anchor(PIECES)) == 1


def test_the_leading_space_of_a_sentence_piece_output_survives() -> None:
    ids = [PIECES.token_to_id("▁hello"), PIECES.token_to_id("▁world")]
    assert PIECES.decode(ids) == "hello world"
    assert "".join(stream(PIECES, ids)) == " hello world"


@given(st.lists(st.integers(1, PIECES.get_vocab_size() - 1), max_size=60))
def test_any_sentence_piece_ids_decode_and_keep_their_words(ids: list[int]) -> None:
    text = "".join(stream(PIECES, ids))
    for word in ("▁hello", "▁world"):
        assert text.count(word.replace("▁", " ")) >= ids.count(PIECES.token_to_id(word))


ADDED = byte_level_tokenizer()
ADDED.add_tokens(["<tool>", "\u00a9", "ä", "日本", "two words"])
ADDED.add_special_tokens(["<|thought|>", "ö"])


def in_parts(detokenizer: AnyDetokenizer, ids: list[int], cuts: list[int]) -> str:
    """Decode ids in parts that end at these places."""
    ends = [*sorted(cuts), len(ids)]
    parts = [detokenizer.push_all(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return "".join(parts) + detokenizer.flush()


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.integers(0, ADDED.get_vocab_size() + 20), st.sampled_from(SINGLE_BYTES)), max_size=100),
    st.lists(st.integers(0, 100), max_size=8),
    st.booleans(),
)
def test_bytes_of_any_ids_in_any_parts_decode_as_a_whole(ids: list[int], cuts: list[int], skip_special: bool) -> None:
    whole = ADDED.decode(ids, skip_special_tokens=skip_special)
    assert in_parts(ByteDetokenizer(DecodedBytes(ADDED, skip_special)), ids, cuts) == whole
    assert in_parts(Detokenizer(ADDED, (), skip_special), ids, cuts) == whole


IDS_OF_ANY_KIND = st.lists(
    st.one_of(
        st.integers(0, ADDED.get_vocab_size() + 20),
        st.sampled_from(SINGLE_BYTES),
        st.sampled_from([token_id for ids in BYTES for token_id in ids]),
        st.sampled_from([0, 1, *BPE.encode("\N{REPLACEMENT CHARACTER}", add_special_tokens=False).ids]),
    ),
    max_size=100,
)


@settings(max_examples=300)
@given(IDS_OF_ANY_KIND, st.booleans())
def test_bytes_give_each_token_the_text_that_any_tokenizer_gives_it(ids: list[int], skip_special: bool) -> None:
    by_bytes, general = ByteDetokenizer(DecodedBytes(ADDED, skip_special)), Detokenizer(ADDED, (), skip_special)
    assert [by_bytes.push(token_id) for token_id in ids] == [general.push(token_id) for token_id in ids]
    assert by_bytes.flush() == general.flush()


@settings(max_examples=300)
@given(IDS_OF_ANY_KIND, st.lists(st.integers(1, 12), max_size=100), st.booleans())
def test_bytes_give_each_group_of_tokens_the_text_of_its_tokens_one_by_one(
    ids: list[int], sizes: list[int], skip_special: bool
) -> None:
    by_bytes, general = ByteDetokenizer(DecodedBytes(ADDED, skip_special)), Detokenizer(ADDED, (), skip_special)
    start = 0
    for size in [*sizes, len(ids)]:
        group = ids[start : start + size]
        assert by_bytes.push_all(group) == "".join([general.push(token_id) for token_id in group])
        start += size
    assert by_bytes.flush() == general.flush()


@pytest.mark.parametrize("detokenizer", [Detokenizer(BPE), ByteDetokenizer(DecodedBytes(BPE, True))])
def test_a_token_that_ends_inside_a_character_waits_for_its_end(detokenizer: AnyDetokenizer) -> None:
    word = BPE.encode("one", add_special_tokens=False).ids
    space_and_part, *middle, end = BPE.encode(" 🙂", add_special_tokens=False).ids
    assert DecodedBytes(BPE, True)[space_and_part].startswith(b" \xf0"), (
        "one token of a space and a part of a character"
    )
    assert detokenizer.push_all([*word, space_and_part]) == "one"
    assert [detokenizer.push(token_id) for token_id in middle] == [""] * len(middle)
    assert [detokenizer.push_all([end, *word]), detokenizer.flush()] == [" 🙂one", ""]


@pytest.mark.parametrize("detokenizer", [Detokenizer(BPE), ByteDetokenizer(DecodedBytes(BPE, True))])
def test_a_character_outlasts_many_skipped_tokens_inside_it(detokenizer: AnyDetokenizer) -> None:
    first, *rest = BPE.encode("日", add_special_tokens=False).ids
    texts = [detokenizer.push(token_id) for token_id in [first, *[0, 1] * 3 * MAX_HELD_IDS, *rest]]
    assert "".join(texts) == texts[-1] == "日"
    assert len(detokenizer._held) < MAX_HELD_IDS


def test_bytes_that_never_are_a_character_take_no_memory() -> None:
    lone_byte = BPE.encode("日", add_special_tokens=False).ids[-1]
    detokenizer = ByteDetokenizer(DecodedBytes(BPE, True))
    text = "".join([detokenizer.push(lone_byte) for _ in range(500)])
    assert len(detokenizer._held) <= MAX_HELD_IDS
    assert text + detokenizer.flush() == BPE.decode([lone_byte] * 500)


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.ByteLevel()]), True),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), False),
        (decoders.Metaspace(), False),
        (PIECES.decoder, False),
        (None, False),
    ],
)
def test_only_a_decoder_of_bytes_alone_is_byte_level(decoder: decoders.Decoder | None, expected: bool) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoder
    assert is_byte_level(tokenizer) is expected
