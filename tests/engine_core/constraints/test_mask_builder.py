"""Masks of many constraints at once, and rejected tokens."""

from itertools import groupby, zip_longest
from random import Random
from typing import cast

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

from benchmarks.measuring.grammars import SCHEMAS
from tandem.engine_core.constraints.faster_way import PROBE_EVERY
from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.constraints.mask_builder import MEASURED_MASKS, MaskBuilder
from tandem.engine_core.constraints.threads import PARALLEL_BASES, PARALLEL_ROWS
from tandem.engine_core.stats import new_stats
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.slow_matcher import SlowExecutor, SlowMatcher

WORDS = -(-VOCAB // 32)
UNTOUCHED = 0x5A5A5A5A


@pytest.fixture(params=[None, 2], ids=["one thread", "parallel"])
def mask_builder(request: pytest.FixtureRequest) -> MaskBuilder:
    return MaskBuilder({2: LLExecutor(2)} if request.param else {}, ENDS, new_stats(), FakeClock())


def constraint(grammars: Grammars, regex: str, ignore_ends: bool = False) -> GrammarConstraint:
    return grammars.compile(LLMatcher.grammar_from_regex(regex)).constraint(ignore_ends)


def allowed(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def masks(rows: int) -> np.ndarray:
    return np.full((rows, WORDS), UNTOUCHED, dtype=np.int32)


def test_fill_writes_each_mask_into_its_row_only(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    tokenizer, out = grammars.prepare(), masks(40)
    wanted = [(constraint(grammars, letter), 39 - 3 * index) for index, letter in enumerate("abcdefghijkl")]
    mask_builder.fill(wanted, out)
    for index, letter in enumerate("abcdefghijkl"):
        assert allowed(out[39 - 3 * index]) == tokenizer.tokenize_str(letter)
    taken = {place for _, place in wanted}
    assert all((out[place] == UNTOUCHED).all() for place in range(40) if place not in taken)
    assert mask_builder.stats.mask_rows == 12


def test_fill_counts_its_time() -> None:
    clock = FakeClock()
    mask_builder = MaskBuilder({}, ENDS, new_stats(), clock)
    slow = CompiledGrammar(cast("LLMatcher", SlowMatcher((clock, 2.5))), frozenset(ENDS))
    mask_builder.fill([(slow.constraint(ignore_ends=False), 0)], masks(1))
    assert mask_builder.stats.mask_seconds == 2.5


def test_ids_beyond_the_tokenizer_are_never_allowed(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    out = masks(1)
    mask_builder.fill([(constraint(grammars, "(.|\\n)*"), 0)], out)
    ids = allowed(out[0])
    assert len(ids) > 4000
    assert max(ids) < 4096


def test_every_end_id_is_allowed_where_a_grammar_may_end(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    out = masks(2)
    mask_builder.fill([(constraint(grammars, "a*"), 0), (constraint(grammars, "a+"), 1)], out)
    assert set(ENDS) <= set(allowed(out[0]))
    assert not set(ENDS) & set(allowed(out[1]))


def test_a_string_may_end_after_every_token_of_it(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    """An answer that runs on in a string is the model's choice, not the mask's."""
    tokenizer, out = grammars.prepare(), masks(1)
    (quote,) = tokenizer.tokenize_str('"')
    schema = LLMatcher.grammar_from_json_schema({"type": "string"}, overrides={"whitespace_flexible": False})
    followed = grammars.compile(schema).constraint(ignore_ends=False)
    begun = 0
    for token in tokenizer.tokenize_str('"Remove any common\\nleading whitespace `text`, \u00e9\u4e2d 12.'):
        assert followed.accept(token)
        begun += 1
        mask_builder.fill([(followed, 0)], out)
        text = tokenizer.decode_bytes([token])
        assert quote in allowed(out[0]) or text.endswith(b"\\") or text[-1] >= 0x80, text
    assert begun > 10


def test_ignored_ends_are_allowed_only_where_nothing_else_is(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    out = masks(3)
    mask_builder.fill([(constraint(grammars, "a*", ignore_ends=True), 0), (constraint(grammars, "", True), 2)], out)
    letters = allowed(out[0])
    assert letters
    assert not set(ENDS) & set(letters)
    assert allowed(out[2]) == list(ENDS)
    assert (out[1] == UNTOUCHED).all()


def test_end_ids_may_share_a_word_and_take_its_sign_bit(grammars: Grammars) -> None:
    ends = (31, 63, 62)
    file, clock = grammars.tokenizer_file, FakeClock()
    other, mask_builder = Grammars(file, VOCAB, ends), MaskBuilder({}, ends, new_stats(), clock)
    out = masks(2)
    mask_builder.fill([(constraint(other, "[a-z]*"), 0), (constraint(other, "[a-z]*", ignore_ends=True), 1)], out)
    assert set(allowed(out[0])) - set(allowed(out[1])) == set(ends)


def test_rejected_token_leaves_other_constraints_of_the_grammar_untouched(grammars: Grammars) -> None:
    some = [constraint(grammars, "[ab]{2}") for _ in range(5)]
    (a,), (z,) = (grammars.prepare().tokenize_str(letter) for letter in "az")
    others = [True, False, True, True, True]
    assert [each.accept(token) for each, token in zip(some, (a, z, a, a, a), strict=True)] == others
    assert [not each.problem for each in some] == others
    assert [each.accept(a) for each in some] == others, "a problem stays"
    assert all(each.is_complete for each, taken in zip(some, others, strict=True) if taken)


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 100, 2**31 - 1])
def test_token_outside_the_vocabulary_is_rejected(grammars: Grammars, token: int) -> None:
    each = constraint(grammars, "a")
    assert not each.accept(token)
    assert "out of range" in each.problem


def test_failed_matcher_allows_only_end_ids_and_accepts_none(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    each, out = constraint(grammars, "a"), masks(1)
    assert not each.accept(300)
    mask_builder.fill([(each, 0)], out)
    assert allowed(out[0]) == list(ENDS)
    assert not each.accept(ENDS[0])


def test_fill_asserts_shape_and_dtype_of_its_output(grammars: Grammars, mask_builder: MaskBuilder) -> None:
    each = [(constraint(grammars, "a"), 0)]
    with pytest.raises(AssertionError, match="for masks"):
        mask_builder.fill(each, masks(2)[:, ::2])
    with pytest.raises(AssertionError, match="for masks"):
        mask_builder.fill(each, masks(2).astype(np.int64))


class TestThreads:
    """Steps whose masks the threads may compute."""

    def constraints(self, clock: FakeClock, *rows: int) -> list[GrammarConstraint]:
        """Return this many constraints of each of several bases, whose masks take a second."""
        compiled = [CompiledGrammar(cast("LLMatcher", SlowMatcher((clock, 1.0))), frozenset(ENDS)) for _ in rows]
        held = [[each.constraint(False) for _ in range(count)] for each, count in zip(compiled, rows, strict=True)]
        return [constraint for of_base in zip_longest(*held) for constraint in of_base if constraint is not None]

    @pytest.mark.parametrize(
        ("rows", "parallel"),
        [
            ([256], False),
            ([64, PARALLEL_ROWS - 1], False),
            ([64, PARALLEL_ROWS], True),
            ([PARALLEL_ROWS, PARALLEL_ROWS], True),
            ([1] * (PARALLEL_BASES - 1), False),
            ([1] * PARALLEL_BASES, True),
        ],
    )
    def test_they_are_used_for_rows_of_several_bases(self, rows: list[int], parallel: bool) -> None:
        clock, executor = FakeClock(), SlowExecutor()
        mask_builder = MaskBuilder({2: cast("LLExecutor", executor)}, ENDS, new_stats(), clock)
        held = self.constraints(clock, *rows)
        mask_builder.fill([(constraint, index) for index, constraint in enumerate(held)], masks(len(held)))
        assert executor.num_masks == ([len(held)] if parallel else [])

    @pytest.mark.parametrize(
        ("rows", "threads"), [([64, 64], 2), ([30, 30, 30], 2), ([16] * 4, 4), ([2] * 64, 8), ([64], 0)]
    )
    def test_there_are_no_more_of_them_than_bases(self, rows: list[int], threads: int) -> None:
        clock, executors = FakeClock(), {count: SlowExecutor() for count in (2, 4, 8)}
        mask_builder = MaskBuilder(cast("dict[int, LLExecutor]", executors), ENDS, new_stats(), clock)
        held = self.constraints(clock, *rows)
        mask_builder.fill([(constraint, index) for index, constraint in enumerate(held)], masks(len(held)))
        assert [count for count, executor in executors.items() if executor.num_masks] == ([threads] if threads else [])

    def test_bases_are_kept_together(self) -> None:
        clock, executor = FakeClock(), SlowExecutor()
        mask_builder = MaskBuilder({2: cast("LLExecutor", executor)}, ENDS, new_stats(), clock)
        held = self.constraints(clock, 30, 20, 10)
        bases = {id(constraint.matcher): constraint.base for constraint in held}
        mask_builder.fill([(constraint, index) for index, constraint in enumerate(held)], masks(len(held)))
        order = [bases[id(matcher)] for matcher in executor.matchers]
        assert len(list(groupby(order))) == 3

    def test_they_are_left_where_they_make_masks_slower(self) -> None:
        clock = FakeClock()
        executor = SlowExecutor((clock, 50.0))
        mask_builder = MaskBuilder({2: cast("LLExecutor", executor)}, ENDS, new_stats(), clock)
        held = self.constraints(clock, 30, 30)
        for constraint in held:
            cast("SlowMatcher", constraint.matcher).costs = ()
        pairs = [(constraint, index) for index, constraint in enumerate(held)]
        for _ in range(3 * PROBE_EVERY):
            mask_builder.fill(pairs, masks(len(held)))
        assert PROBE_EVERY - 1 <= len(executor.num_masks) <= PROBE_EVERY + 2

    def test_they_are_used_on_after_one_slow_step(self) -> None:
        clock = FakeClock()
        executor = SlowExecutor((clock, -0.004))  # threads save as much of 6 ms
        mask_builder = MaskBuilder({2: cast("LLExecutor", executor)}, ENDS, new_stats(), clock, clock)
        held = self.constraints(clock, 30, 30)
        for constraint in held:
            cast("SlowMatcher", constraint.matcher).costs = ((clock, 0.0001),)
        pairs = [(constraint, index) for index, constraint in enumerate(held)]

        def num_parallel() -> int:
            before = len(executor.num_masks)
            for _ in range(10 * PROBE_EVERY):
                mask_builder.fill(pairs, masks(len(held)))
            return len(executor.num_masks) - before

        assert num_parallel() >= 10 * (PROBE_EVERY - 1)
        executor.costs = ((clock, 0.1),)
        mask_builder.fill(pairs, masks(len(held)))
        assert {constraint.cost.unmeasured for constraint in held} == {MEASURED_MASKS}
        executor.costs = ((clock, -0.004),)
        assert num_parallel() >= 10 * (PROBE_EVERY - 1)

    def test_a_mask_that_the_loops_thread_computes_is_measured(self) -> None:
        clock = FakeClock()
        mask_builder = MaskBuilder({}, ENDS, new_stats(), clock)
        held = self.constraints(clock, 2)
        held[0].cost.unmeasured = MEASURED_MASKS
        mask_builder.fill([(constraint, index) for index, constraint in enumerate(held)], masks(2))
        assert [constraint.cost.unmeasured for constraint in held] == [MEASURED_MASKS - 1, 0]


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_masks_of_many_rows_are_those_of_matchers_compiled_alone(
    grammars: Grammars, mask_builder: MaskBuilder, name: str
) -> None:
    """At random walks over every schema, whichever base a row is of and whichever thread computes."""
    random, rows, steps = Random(name), 60, 20
    text = LLMatcher.grammar_from_json_schema(SCHEMAS[name])
    bases = [grammars.compile(text).bases[0] for _ in range(3)]
    held = [GrammarConstraint(base.matcher.deep_copy(), base, frozenset(ENDS), False) for base in bases * 20]
    alone = [LLMatcher(grammars.prepare(), text, log_level=0) for _ in range(rows)]
    out = masks(rows)
    for _ in range(steps):
        places = random.sample(range(rows), rows)
        mask_builder.fill(list(zip(held, places, strict=True)), out)
        for row, (constraint, reference) in enumerate(zip(held, alone, strict=True)):
            mask = out[places[row]]
            assert mask.tobytes() == reference.compute_bitmask(), f"{name}, row {row}"
            token = random.choice(allowed(mask))
            assert constraint.accept(token) and reference.consume_token(token)
            if constraint.is_complete:
                base = constraint.base
                held[row] = GrammarConstraint(base.matcher.deep_copy(), base, frozenset(ENDS), False)
                alone[row] = LLMatcher(grammars.prepare(), text, log_level=0)
