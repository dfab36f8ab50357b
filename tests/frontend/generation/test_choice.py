"""Tokens of one sequence as deltas of text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.generation.choice import Choice, ChoiceDelta
from tandem.frontend.generation.detokenizer import Detokenizer
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tests.fakes.tokenizer import byte_level_tokenizer

RAW = byte_level_tokenizer()


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text).ids
    return ids


def choice(stops: Sequence[str] = (), min_tokens: int = 0) -> Choice:
    return Choice(3, Detokenizer(RAW), StopMatcher(stops) if stops else None, min_tokens)


def test_advance_without_an_end_returns_text_and_ids() -> None:
    assert choice().advance(encode("one two"), None) == ChoiceDelta(3, "one two", encode("one two"), None)


def test_a_stop_token_counts_and_has_no_text() -> None:
    ended = choice()
    ended.advance(encode("one"), None)
    word = encode(" two")[-1:]
    piece = ended.advance(word, Finished(1, FinishReason.STOP, word[0]))
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("", word, "stop")
    assert ended.num_tokens == len(encode("one")) + 1


def test_a_stop_string_in_the_last_delta_wins_over_the_engine() -> None:
    stopped = choice(["two"])
    ids = encode("one two three")
    piece = stopped.advance(ids, Finished(1, FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason) == ("one ", "stop")
    assert stopped.num_tokens == len(piece.token_ids) < len(ids)


def test_include_stop_keeps_the_stop_string_or_token() -> None:
    def including(stops: Sequence[str] = ()) -> Choice:
        return Choice(0, Detokenizer(RAW), StopMatcher(stops) if stops else None, 0, include_stop=True)

    assert including(["two"]).advance(encode("one two three"), None).text == "one two"
    assert including().advance(encode("one two"), Finished(1, FinishReason.STOP, encode(" two")[-1])).text == "one two"
    cut = encode("日")[:-1]
    replacement = "\N{REPLACEMENT CHARACTER}"
    piece = including([replacement]).advance(cut, Finished(1, FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason) == (replacement, "stop")


def test_the_flushed_character_may_complete_a_stop_string() -> None:
    cut = encode("日")[:-1]
    piece = choice(["\N{REPLACEMENT CHARACTER}"]).advance(cut, Finished(1, FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason) == ("", "stop")
    assert choice(["x"]).advance(cut, Finished(1, FinishReason.LENGTH)).text == "\N{REPLACEMENT CHARACTER}"


def test_a_failure_or_an_abort_gives_no_finish_reason() -> None:
    for terminal in (Failure(1, ErrorCode.ENGINE_FAILED, ""), Finished(1, FinishReason.ABORT)):
        piece = choice().advance(encode("one"), terminal)
        assert (piece.text, piece.finish_reason) == ("one", None)


def test_a_delta_without_text_ids_and_reason_is_empty() -> None:
    assert ChoiceDelta(0, "", [], None).is_empty
    assert not ChoiceDelta(0, "", [1], None).is_empty
    assert not ChoiceDelta(0, "", [], "stop").is_empty


@given(st.text(max_size=20), st.sampled_from([(), ("b",), ("ab", "c")]), st.booleans(), st.integers(0, 5))
def test_advance_singly_equals_advance(text: str, stops: tuple[str, ...], stop_token: bool, min_tokens: int) -> None:
    ids = encode(text)
    end = Finished(1, FinishReason.STOP, ids[-1]) if stop_token and ids else Finished(1, FinishReason.LENGTH)
    at_once, singly = choice(stops, min_tokens), choice(stops, min_tokens)
    whole, pieces = at_once.advance(ids, end), singly.advance_singly(ids, end)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
    assert all(len(piece.token_ids) <= 1 for piece in pieces)
    assert singly.num_tokens == at_once.num_tokens
