"""Matchers that begin again with new tables where those of their grammar are full."""

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import CompiledGrammar, Grammars
from tandem.engine_core.constraints.local_matcher import MIN_RENEWAL_TOKENS, LocalMatcher
from tests.engine_core.constraints.conftest import ENDS, VOCAB

FULL = "lexer error: too many states: 50000 >= 50000"
WORDS = -(-VOCAB // 32)


class LimitedMatcher:
    """Fake of `LLMatcher` whose tables, shared by its copies, hold a number of tokens and masks."""

    def __init__(self, room: list[int], error: str = FULL) -> None:
        self.room = room
        self.error = error
        self.failed = ""
        self.tokens: list[int] = []

    def deep_copy(self) -> "LimitedMatcher":
        return LimitedMatcher(self.room, self.error)

    def consume_token(self, token: int) -> bool:
        self.take()
        self.tokens.append(token)
        return not self.failed and token != 13

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.take()

    def take(self) -> None:
        self.room[0] -= 1
        self.failed = self.failed or (self.error if self.room[0] < 0 else "")

    def compute_bitmask(self) -> bytes:
        return b""

    def is_error(self) -> bool:
        return bool(self.failed)

    def get_error(self) -> str:
        return self.failed

    def is_stopped(self) -> bool:
        return False

    def compute_ff_tokens(self) -> list[int]:
        return []


class Shelf:
    """Tables that may be replaced as often as rooms are given."""

    def __init__(self, *rooms: int, error: str = FULL) -> None:
        self.rooms = list(rooms)
        self.error = error
        self.first = LimitedMatcher([self.rooms.pop(0)], error)

    def renew(self, full: LimitedMatcher) -> bool:
        if self.first is full:
            if not self.rooms:
                return False
            self.first = LimitedMatcher([self.rooms.pop(0)], self.error)
        return True

    def discard(self, failed: LimitedMatcher) -> None:
        raise AssertionError("no lexer was out of fuel")


def matcher(shelf: Shelf) -> LocalMatcher:
    return LocalMatcher(shelf)  # type: ignore[arg-type]


def test_tokens_are_followed_again_in_new_tables() -> None:
    shelf = Shelf(3, 100)
    one = matcher(shelf)
    assert all(one.consume_token(token) for token in range(3))
    assert one.consume_token(3) and shelf.rooms == []
    one.write_mask(0, 0)
    assert not one.get_error()
    assert shelf.first.room == [100 - 4 - 1]


def test_a_mask_is_written_again_in_new_tables() -> None:
    shelf = Shelf(2, 100)
    one = matcher(shelf)
    assert one.consume_token(1) and one.consume_token(2)
    one.write_mask(0, 0)
    assert not one.get_error() and shelf.first.room == [100 - 2 - 1]


def test_new_tables_serve_all_that_shared_the_full_ones() -> None:
    shelf = Shelf(4, 100)
    one, other = matcher(shelf), matcher(shelf)
    for token in range(2):
        assert one.consume_token(token) and other.consume_token(token)
    assert one.consume_token(2) and other.consume_token(2)
    assert shelf.rooms == [] and shelf.first.room == [100 - 3 - 3]


def test_a_rejected_token_is_no_reason_to_begin_again() -> None:
    shelf = Shelf(50, 100)
    one = matcher(shelf)
    assert one.consume_token(1) and not one.consume_token(13) and not one.accepted
    assert shelf.rooms == [100]


def test_another_limit_is_no_reason_to_begin_again() -> None:
    shelf = Shelf(1, 100, error="too many items")
    one = matcher(shelf)
    assert one.consume_token(1) and not one.consume_token(2)
    assert shelf.rooms == [100] and one.get_error() == "too many items"


def test_tables_that_cannot_be_replaced_end_a_sequence() -> None:
    one = matcher(Shelf(1))
    assert one.consume_token(1) and not one.consume_token(2)
    assert one.get_error() == FULL


def test_a_grammar_that_fills_its_tables_at_once_is_given_up() -> None:
    shelf = Shelf(5, 10, 1000)
    one = matcher(shelf)
    tokens = iter(range(100, 1000))
    while one.consume_token(next(tokens)):
        pass
    assert shelf.rooms == [1000], f"the second tables lasted for fewer than {MIN_RENEWAL_TOKENS} tokens"


def test_tables_that_lasted_are_replaced_each_time() -> None:
    room = 4 * MIN_RENEWAL_TOKENS
    shelf = Shelf(room, 2 * room, 3 * room, 4 * room)
    one = matcher(shelf)
    assert all(one.consume_token(100) for _ in range(3 * room))
    assert len(shelf.rooms) == 1


@pytest.mark.parametrize("length", [1, 40])
def test_sequences_of_a_long_string_do_not_exhaust_its_grammar(
    grammars: Grammars, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer states for a lexer, the strings of a dozen sequences need more than it may have."""
    monkeypatch.setattr("tandem.engine_core.constraints.matchers.MAX_LEXER_STATES", 3000)
    text = LLMatcher.grammar_from_json_schema({"type": "string", "maxLength": 4000})
    compiled, mask = grammars.compile(text), np.zeros((1, WORDS), dtype=np.int32)
    unlimited = grammars.prepare()
    seen = {id(compiled.first)}
    for number in range(12):
        one, alone = compiled.constraint(ignore_ends=False), LLMatcher(unlimited, text, log_level=0)
        for token in unlimited.tokenize_str('"' + f"word number {number}, " * length):
            assert one.local is not None
            one.local.write_mask(mask.ctypes.data, mask.nbytes)
            assert mask.tobytes() == alone.compute_bitmask()
            assert one.accept(token) and alone.consume_token(token), one.problem
        seen.add(id(compiled.first))
    assert (len(seen) > 1) == (length > 1)


def test_a_slow_grammar_is_recompiled_for_the_next_request() -> None:
    first = LimitedMatcher([1])
    compiled = CompiledGrammar(first, frozenset(ENDS))  # type: ignore[arg-type]
    one = compiled.constraint(ignore_ends=False)
    assert one.accept(1) and not compiled.is_spent
    assert not one.accept(2) and compiled.is_spent
    assert one.problem == FULL


def test_a_lexer_without_fuel_fails_no_later_request() -> None:
    first = LimitedMatcher([1], error="lexer error: too many expressions constructed")
    compiled = CompiledGrammar(first, frozenset(ENDS), lambda: first)  # type: ignore[arg-type,return-value]
    one = compiled.constraint(ignore_ends=False)
    assert one.accept(1) and not compiled.is_spent
    assert not one.accept(2) and compiled.is_spent


def walk(grammars: Grammars, compiled: CompiledGrammar, text: str) -> bool:
    """Return whether a grammar accepts a text, without a mask after the first token, as where tokens are forced."""
    one, mask = LocalMatcher(compiled), np.zeros((1, WORDS), dtype=np.int32)
    tokens = grammars.prepare().tokenize_str(text)
    assert one.consume_token(tokens[0])
    one.write_mask(mask.ctypes.data, mask.nbytes)
    return all(one.consume_token(token) for token in tokens[1:])


@pytest.mark.parametrize("states", range(1000, 1120, 20))
def test_tables_that_are_full_within_a_token_are_replaced(
    grammars: Grammars, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine_core.constraints.matchers.MAX_LEXER_STATES", states)
    compiled = grammars.compile(LLMatcher.grammar_from_regex("a[a-z, ]{0,2000}|b[a-z,. ]{0,2000}"))
    first = compiled.first
    assert walk(grammars, compiled, "a" + "several words, " * 50) and compiled.first is first
    assert walk(grammars, compiled, "b" + "several words, " * 50) and compiled.first is not first


@pytest.mark.parametrize("fuel", range(2000, 2120, 20))
def test_a_lexer_out_of_fuel_within_a_token_fails_no_later_request(
    grammars: Grammars, fuel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine_core.constraints.matchers.LEXER_STEP_FUEL", fuel)
    compiled = grammars.compile(LLMatcher.grammar_from_regex("a[a-z, ]{0,2000}"))
    assert walk(grammars, compiled, "a" + "several words, ") and not compiled.is_spent
    assert not walk(grammars, compiled, "a" + "several words, " * 100) and compiled.is_spent


def test_tokens_followed_at_once_leave_fuel_for_others(grammars: Grammars) -> None:
    """The lexer would be out of it after some 14,000 characters, and then fail for all sequences of its grammar."""
    compiled = grammars.compile(LLMatcher.grammar_from_json_schema({"type": "string", "maxLength": 40000}))
    tokens = grammars.prepare().tokenize_str('"' + "several words, " * 2600)
    one = LocalMatcher(compiled, tokens)
    other = LocalMatcher(compiled, tokens)
    assert one.accepted and other.accepted and not compiled.is_spent
