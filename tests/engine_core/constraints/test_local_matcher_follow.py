"""Forced tokens after each token, which a matcher does not recompute if they are known."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import CompiledGrammar, Grammars
from tandem.engine_core.constraints.local_matcher import LocalMatcher
from tests.engine_core.constraints.conftest import VOCAB
from tests.support.effort import EFFORT
from tests.support.grammar_walks import WALKED, fixed_record, mask_of, next_token

WORDS = -(-VOCAB // 32)


@pytest.fixture(scope="module")
def compiled(grammars: Grammars) -> dict[str, CompiledGrammar]:
    return {name: grammars.compile(text) for name, text in WALKED.items()}


class Counting:
    """Matcher that counts how often it computes what is forced."""

    def __init__(self, matcher: LLMatcher, counts: list[int]) -> None:
        self.matcher = matcher
        self.counts = counts

    def compute_ff_tokens(self) -> list[int]:
        self.counts[0] += 1
        return self.matcher.compute_ff_tokens()

    def __getattr__(self, name: str) -> object:
        return getattr(self.matcher, name)


def count_forced(one: LocalMatcher) -> list[int]:
    """Have a matcher count how often it computes what is forced; return the count."""
    counts = [0]
    one._matcher = Counting(one._matcher, counts)  # type: ignore[assignment]
    return counts


def follow_both(one: LocalMatcher, alone: LLMatcher, token: int, nearly_full: bool = False) -> None:
    """Compare what follows a token with a matcher alone.

    nearly_full: the tables are small; just before they are full, llguidance computes only the start of a forced run.
    """
    forced, accepted = one.follow(token), alone.consume_token(token)
    assert one.accepted == accepted
    goes_on = accepted and not alone.is_stopped()
    expected = alone.compute_ff_tokens() if goes_on else None
    if nearly_full and forced and expected:
        expected = expected[: len(forced)]
    assert forced == expected
    check_equal(one, alone, nearly_full)


def check_equal(one: LocalMatcher, alone: LLMatcher, nearly_full: bool = False) -> None:
    assert (one.is_stopped(), bool(one.get_error())) == (alone.is_stopped(), alone.is_error())
    found, expected = one.compute_ff_tokens(), alone.compute_ff_tokens()
    assert found == (expected[: len(found)] if nearly_full and found else expected)


@pytest.mark.parametrize("name", list(WALKED))
def test_forced_tokens_are_those_of_a_matcher_alone(compiled: dict[str, CompiledGrammar], name: str) -> None:
    """At random walks, in which tokens are followed or only accepted, one by one or a run of forced ones at once."""
    grammar, num_runs = compiled[name], 0
    for seed in range(12 * EFFORT):
        random = Random(f"{name} {seed}")
        one, alone = LocalMatcher(grammar), grammar.first.deep_copy()
        for _ in range(120):
            if alone.is_stopped() and random.random() < 0.8:
                break
            forced, way = alone.compute_ff_tokens(), random.random()
            if forced and way < 0.15:
                run = forced[: random.randrange(1, len(forced) + 1)]
                assert one.consume_tokens(run) and alone.consume_tokens(run)
                num_runs += 1
                check_equal(one, alone)
                continue
            token = next_token(random, alone, VOCAB, strays=0.01)
            if way < 0.7:
                follow_both(one, alone, token)
            else:
                assert one.consume_token(token) == alone.consume_token(token)
                check_equal(one, alone)
    assert num_runs or name in ("letters", "words", "array", "few ends"), "tokens are forced in the others"


def test_a_forced_run_is_computed_once(compiled: dict[str, CompiledGrammar]) -> None:
    """Tokens forced after its end are computed again, as after a token outside the run."""
    grammar = compiled["one text"]
    one, alone = LocalMatcher(grammar), grammar.first.deep_copy()
    counts, run = count_forced(one), alone.compute_ff_tokens()
    assert len(run) > 4
    told = [one.follow(token) for token in run]
    assert told[:-1] == [run[index:] for index in range(1, len(run))] and told[-1] is None
    assert counts == [1], "once after the first token; nothing may follow the last"


@pytest.mark.parametrize("index", range(1, 6))
def test_a_shorter_token_than_the_forced_one(
    compiled: dict[str, CompiledGrammar], grammars: Grammars, index: int
) -> None:
    """Its text is forced too, but what follows it is not what follows the longer one."""
    grammar, tokenizer = compiled["one text"], grammars.prepare()
    one, alone = LocalMatcher(grammar), grammar.first.deep_copy()
    run = alone.compute_ff_tokens()
    for token in run[:index]:
        follow_both(one, alone, token)
    shorter = tokenizer.tokenize_str(tokenizer.decode_bytes([run[index]])[:1].decode())[0]
    assert shorter != run[index]
    follow_both(one, alone, shorter)
    assert one.accepted and one.compute_ff_tokens() != run[index + 1 :]


def test_a_rejected_token_leaves_nothing_known(compiled: dict[str, CompiledGrammar]) -> None:
    grammar = compiled["one text"]
    one = LocalMatcher(grammar)
    run = one.compute_ff_tokens()
    assert one.follow(run[0]) == run[1:]
    assert one.follow(300) is None and not one.accepted and one.get_error()
    assert one.follow(run[1]) is None and not one.accepted


@pytest.mark.parametrize("at_once", [False, True])
def test_tokens_that_are_only_accepted_end_what_is_known(compiled: dict[str, CompiledGrammar], at_once: bool) -> None:
    """The first of them is not the next of what was forced any more."""
    grammar = compiled["one text"]
    one = LocalMatcher(grammar)
    run = one.compute_ff_tokens()
    assert one.follow(run[0]) == run[1:]
    if at_once:
        assert one.consume_tokens(run[1:3])
    else:
        assert one.consume_token(run[1]) and one.consume_token(run[2])
    counts = count_forced(one)
    assert one.follow(run[3]) == run[4:] and counts == [1]
    assert one.num_tokens == 4


def test_forced_tokens_accepted_at_once_are_remembered(compiled: dict[str, CompiledGrammar]) -> None:
    """A matcher that begins again follows them too."""
    grammar = compiled["record"]
    one = LocalMatcher(grammar)
    run = one.compute_ff_tokens()
    assert one.consume_tokens(run) and one.accepted and one.num_tokens == len(run)
    one._first = one.tables.first
    again = LocalMatcher(grammar, one._tokens)
    assert again.compute_ff_tokens() == one.compute_ff_tokens()
    assert mask_of(again._matcher, WORDS) == mask_of(one._matcher, WORDS)
    assert one.consume_tokens([]) and one.num_tokens == len(run)


class RenewedTables:
    """Tables that come to their limit at a given token, and are replaced by the same grammar's."""

    def __init__(self, grammar: CompiledGrammar, full_at: int) -> None:
        self.grammar = grammar
        self.first = FullMatcher(grammar.first.deep_copy(), full_at)
        self.start = grammar.start
        self.num_renewed = 0

    def renew(self, full: object) -> bool:
        if self.first is full:
            self.num_renewed += 1
            self.first = FullMatcher(self.grammar.first.deep_copy(), 10_000)
        return True

    def discard(self, failed: object) -> None:
        raise AssertionError("no lexer was out of fuel")


class FullMatcher:
    """Matcher whose lexer has no room for more states after a number of tokens."""

    def __init__(self, matcher: LLMatcher, room: int) -> None:
        self.matcher = matcher
        self.room = room

    def deep_copy(self) -> "FullMatcher":
        return FullMatcher(self.matcher.deep_copy(), self.room)

    def consume_token(self, token: int) -> bool:
        return self.consume_tokens([token])

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        self.room -= len(tokens)
        return self.room >= 0 and self.matcher.consume_tokens(list(tokens))

    def get_error(self) -> str:
        return "too many states: 50000 >= 50000" if self.room < 0 else self.matcher.get_error()

    def is_error(self) -> bool:
        return self.room < 0 or self.matcher.is_error()

    def is_stopped(self) -> bool:
        return self.room < 0 or self.matcher.is_stopped()

    def compute_ff_tokens(self) -> list[int]:
        return self.matcher.compute_ff_tokens()

    def compute_bitmask(self) -> bytes:
        return self.matcher.compute_bitmask()


@pytest.mark.parametrize("name", ["one text", "record", "long record"])
@pytest.mark.parametrize("full_at", [1, 2, 3, 4, 6])
def test_tables_renewed_in_the_middle_of_a_run(compiled: dict[str, CompiledGrammar], name: str, full_at: int) -> None:
    """What is known of the run holds, and all tokens so far are followed in the new tables."""
    grammar, random = compiled[name], Random(full_at)
    for at_once in (False, True):
        tables = RenewedTables(grammar, full_at)
        one, alone = LocalMatcher(tables), grammar.first.deep_copy()  # type: ignore[arg-type]
        if at_once:
            run = alone.compute_ff_tokens()
            assert one.consume_tokens(run) and alone.consume_tokens(run)
            check_equal(one, alone)
        while not alone.is_stopped():
            follow_both(one, alone, next_token(random, alone, VOCAB, strays=0.0))
        assert tables.num_renewed == 1 and one.num_tokens > full_at


def test_full_tables_of_a_real_grammar_are_renewed(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer states for a lexer; the names of the properties are forced between the strings that fill them."""
    monkeypatch.setattr("tandem.engine_core.constraints.matchers.MAX_LEXER_STATES", 2000)
    names = [f"a long name of property {number}" for number in range(4)]
    text = fixed_record(**{name: {"type": "string", "maxLength": 4000} for name in names})
    compiled, tokenizer, num_forced = grammars.compile(text), grammars.prepare(), 0
    seen, mask = {id(compiled.first): compiled.first}, np.zeros(WORDS, dtype=np.int32)
    for sequence in range(4):
        one, alone = LocalMatcher(compiled), LLMatcher(tokenizer, text, log_level=0)
        for name in names:
            while forced := alone.compute_ff_tokens():
                follow_both(one, alone, forced[0], nearly_full=True)
                num_forced += 1
            for token in tokenizer.tokenize_str(f"word number {sequence} of {name}, " * 20 + '"'):
                one.write_mask(mask.ctypes.data, mask.nbytes)
                follow_both(one, alone, token, nearly_full=True)
        seen[id(compiled.first)] = compiled.first
    assert len(seen) > 1 and num_forced > 100
