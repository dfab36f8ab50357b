"""Deltas of one sequence as pieces of text."""

from collections.abc import Sequence

from frontend.choice import Choice, Piece
from frontend.detokenizer import Detokenizer
from frontend.stop_strings import StopMatcher
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure, Finished
from tests.fakes.tokenizer import byte_level_tokenizer

RAW = byte_level_tokenizer()


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text).ids
    return ids


def choice(stops: Sequence[str] = (), min_tokens: int = 0) -> Choice:
    return Choice(3, Detokenizer(RAW), StopMatcher(stops) if stops else None, min_tokens)


def test_a_delta_without_an_end() -> None:
    assert choice().advance(encode("one two"), None) == Piece(3, "one two", encode("one two"), None)


def test_the_stop_token_is_counted_and_not_shown_even_when_it_comes_alone() -> None:
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


def test_the_flushed_character_may_complete_a_stop_string() -> None:
    cut = encode("日")[:-1]
    piece = choice(["\N{REPLACEMENT CHARACTER}"]).advance(cut, Finished(1, FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason) == ("", "stop")
    assert choice(["x"]).advance(cut, Finished(1, FinishReason.LENGTH)).text == "\N{REPLACEMENT CHARACTER}"


def test_a_failure_or_an_abort_is_no_finish() -> None:
    for terminal in (Failure(1, ErrorCode.ENGINE_FAILED, ""), Finished(1, FinishReason.ABORT)):
        piece = choice().advance(encode("one"), terminal)
        assert (piece.text, piece.finish_reason) == ("one", None)


def test_pieces_that_say_nothing_are_known() -> None:
    assert Piece(0, "", [], None).is_empty
    assert not Piece(0, "", [1], None).is_empty
    assert not Piece(0, "", [], "stop").is_empty
