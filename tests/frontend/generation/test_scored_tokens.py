"""Log-probabilities in step with the text: offsets, hold-back and cuts."""

import math
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tandem.frontend.generation.choice import Choice, ChoiceDelta
from tandem.frontend.generation.detokenizer import Detokenizer
from tandem.frontend.generation.scored_tokens import LOWEST, ScoredToken, ScoredTokens, echoed_prompt, finite
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.frontend.generation.token_bytes import token_bytes
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.errors import FinishReason, ProtocolError
from tandem.protocol.events import Finished, TokenLogprobs
from tests.fakes.engine_request import fake_line, fake_logprob
from tests.fakes.tokenizer import END, byte_level_tokenizer

RAW: tokenizers.Tokenizer = byte_level_tokenizer()
SPELL = token_bytes(RAW)
PROMPT = "naïve 🙂 "
TEXT = "the quick 你好 🙂🙃 fox"
DONE = Finished(1, FinishReason.LENGTH)


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text).ids
    return ids


def choice(stops: Sequence[str] = (), echo: bool = False, include_stop: bool = False) -> Choice:
    prompt = echoed_prompt(encode(PROMPT), PROMPT, Detokenizer(RAW)) if echo else None
    scored = ScoredTokens(SPELL, len(encode(PROMPT)), len(PROMPT), prompt)
    return Choice(0, Detokenizer(RAW), StopMatcher(stops) if stops else None, 0, include_stop, scored)


def lines(tokens: Sequence[int], first: int, top: int = 1) -> TokenLogprobs:
    packed = b"".join([fake_line(position, token, top) for position, token in enumerate(tokens, first)])
    return TokenLogprobs(1, first, top, packed)


def run(made: Choice, tokens: Sequence[int], sizes: Sequence[int] = (), end: Finished = DONE) -> list[ChoiceDelta]:
    """Advance a choice by updates of these sizes; the terminal event comes with the last."""
    prompt = encode(PROMPT)
    ahead, pieces, at = [lines(prompt[1:], 1)], [], 0
    for size in [*sizes, len(tokens)]:
        part = tokens[at : at + size]
        last = at + len(part) == len(tokens)
        pieces.append(made.advance(part, end if last else None, [*ahead, lines(part, len(prompt) + at)]))
        ahead, at = [], at + len(part)
        if last or pieces[-1].finish_reason:
            break
    return pieces


def scored(pieces: Sequence[ChoiceDelta]) -> list[ScoredToken]:
    return [token for piece in pieces for token in piece.logprobs]


def shown(pieces: Sequence[ChoiceDelta]) -> str:
    return "".join([piece.text for piece in pieces])


@pytest.mark.parametrize("known", [True, False])
def test_the_tokens_of_a_prompt_have_their_rank(known: bool) -> None:
    prompt, output = encode(PROMPT), encode(TEXT)[:1]
    made, ahead = choice(echo=True), lines(prompt[1:], 1)
    ranks = [1000 + number for number in range(len(prompt) - 1)]
    if known:
        ahead = structs.replace(ahead, ranks=pack_ids(ranks))
    found = made.advance(output, DONE, [ahead, lines(output, len(prompt))]).logprobs
    for token, rank in zip(found[1:], [*ranks, None], strict=True):
        is_reported = token.token_id in token.alternative_ids
        assert token.rank == (1 if is_reported else rank if known else None)
    assert found[0].rank is None


def test_each_token_has_its_own_logprob() -> None:
    tokens = encode(TEXT)
    found = scored(run(choice(), tokens))
    assert [token.token for token in found] == [SPELL(token) for token in tokens]
    first = len(encode(PROMPT))
    assert [token.logprob for token in found] == [fake_logprob(at, token) for at, token in enumerate(tokens, first)]
    assert all(token.alternatives == [(SPELL(2), LOWEST)] for token in found)


def check_offsets(found: Sequence[ScoredToken], text: str) -> None:
    """Check that whole-character tokens are at their offset, and others at the offset of their character."""
    offsets = [token.offset for token in found]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for token in found:
        try:
            spelled = token.token.decode()
        except UnicodeDecodeError:
            continue
        assert text[token.offset : token.offset + len(spelled)] == spelled


@given(st.text(min_size=1), st.lists(st.integers(1, 5)))
def test_offsets_count_characters_of_the_text(text: str, sizes: list[int]) -> None:
    pieces = run(choice(echo=True), encode(text), sizes)
    found = scored(pieces)
    whole = PROMPT + shown(pieces)
    assert whole == PROMPT + text
    check_offsets(found, whole)
    assert b"".join([token.token for token in found]).decode() == whole
    assert found[0].logprob is None
    assert all(token.logprob is not None for token in found[1:])


@given(st.text("ab🙂 ", min_size=1, max_size=30), st.lists(st.integers(1, 4)), st.text("ab🙂", min_size=1, max_size=3))
def test_a_stop_string_cuts_off_tokens_in_every_chunking(text: str, sizes: list[int], stop: str) -> None:
    tokens = encode(text)
    pieces = run(choice([stop]), tokens, sizes)
    visible = text.partition(stop)[0]
    assert shown(pieces) == visible
    found = scored(pieces)
    assert [token.token for token in found] == [SPELL(token) for token in tokens[: len(found)]]
    if stop in text:
        assert all(token.offset < len(PROMPT) + len(visible) for token in found), "no text of it was shown"
    else:
        assert len(found) == len(tokens)
    assert b"".join([token.token for token in found]).startswith(visible.encode())
    assert scored(run(choice([stop]), tokens, [1] * len(tokens))) == found


def test_an_included_stop_string_keeps_its_tokens() -> None:
    tokens = encode("one two three")
    pieces = run(choice(["two"], include_stop=True), tokens)
    assert shown(pieces) == "one two"
    assert b"".join([token.token for token in scored(pieces)]) == b"one two"


def test_logprobs_are_held_back_with_their_text() -> None:
    """A token is released together with the first part of its text."""
    tokens = encode("x stop the rest")
    made, pieces = choice(["stop there"]), list[ChoiceDelta]()
    for at, token in enumerate([*tokens, None]):
        pieces += run_one(made, token, at, DONE if token is None else None)
        spelled = [token.token.decode() for token in scored(pieces)]
        assert "".join(spelled).startswith(shown(pieces))
        assert len("".join(spelled[:-1])) < len(shown(pieces)) or not spelled
    assert shown(pieces) == "x stop the rest"
    assert [len(piece.logprobs) for piece in pieces].count(0) > 1, "nothing was held back"


def run_one(made: Choice, token: int | None, at: int, end: Finished | None) -> list[ChoiceDelta]:
    part = [] if token is None else [token]
    return [made.advance(part, end, [lines(part, len(encode(PROMPT)) + at)] if part else [])]


def test_half_a_character_at_the_end_keeps_its_logprobs() -> None:
    tokens = encode("a🙂")[:-1]
    pieces = run(choice(), tokens)
    assert shown(pieces) == "a\N{REPLACEMENT CHARACTER}"
    assert [token.offset for token in scored(pieces)] == [len(PROMPT)] + [len(PROMPT) + 1] * (len(tokens) - 1)


def test_an_end_token_counts_only_for_the_mean() -> None:
    tokens = [*encode("one"), RAW.token_to_id(END)]
    end = Finished(1, FinishReason.STOP, tokens[-1])
    pieces = run(choice(), tokens, end=end)
    first = len(encode(PROMPT))
    values = [fake_logprob(at, token) for at, token in enumerate(tokens, first)]
    assert [token.logprob for token in scored(pieces)] == values[:-1]
    assert pieces[-1].mean_logprob == pytest.approx(sum(values) / len(values))


def test_the_mean_ends_with_the_token_that_completed_the_stop_string() -> None:
    tokens = encode("one two three")
    (piece,) = run(choice(["two"]), tokens)
    used = piece.token_ids
    values = [fake_logprob(at, token) for at, token in enumerate(used, len(encode(PROMPT)))]
    assert len(used) < len(tokens)
    assert piece.mean_logprob == pytest.approx(sum(values) / len(values))


def test_a_scored_prompt_without_output_is_released() -> None:
    """A request that scores its prompt gets no output tokens, and the prompt's at the end."""
    prompt = encode(PROMPT)
    made = choice(echo=True)
    first = made.advance([], None, [lines(prompt[1:], 1)])
    assert first.is_empty and not first.logprobs
    last = made.advance([], DONE)
    assert [token.token for token in last.logprobs] == [SPELL(token) for token in prompt]
    check_offsets(last.logprobs, PROMPT)
    assert last.text == "" and last.finish_reason == "length"


def test_special_tokens_of_a_prompt_have_no_characters() -> None:
    ids = [RAW.token_to_id(END), *encode("one two"), RAW.token_to_id(END)]
    prompt = echoed_prompt(ids, "one two", Detokenizer(RAW))
    assert prompt.offsets[0] == prompt.offsets[1] == 0
    assert prompt.offsets[-1] == len("one two")


@pytest.mark.parametrize(
    ("value", "expected"), [(-math.inf, LOWEST), (math.nan, LOWEST), (-1e5, LOWEST), (-9998.5, -9998.5), (0.0, 0.0)]
)
def test_nan_and_infinities_become_the_lowest_logprob(value: float, expected: float) -> None:
    assert finite(value) == expected


def test_partial_logprob_records_are_refused() -> None:
    broken = TokenLogprobs(1, 50, 1, pack_floats([0.0, 0.0]) + pack_ids([1, 2]))
    with pytest.raises(ProtocolError, match=r"\b16\b"):
        choice().advance([5], None, [broken])
