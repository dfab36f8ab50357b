"""Masks of many constraints at once, and rejected tokens."""

from random import Random
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher

from benchmarks.measuring.grammars import SCHEMAS
from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.stats import new_stats
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.inline_link import InlineLink
from tests.fakes.slow_matcher import SlowMatcher

WORDS = -(-VOCAB // 32)
UNTOUCHED = 0x5A5A5A5A


@pytest.fixture
def mask_builder() -> MaskBuilder:
    return MaskBuilder(ENDS, new_stats(), FakeClock())


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
    taken = {index for _, index in wanted}
    assert all((out[index] == UNTOUCHED).all() for index in range(40) if index not in taken)
    assert mask_builder.stats.mask_rows == 12


def test_fill_counts_its_time() -> None:
    clock = FakeClock()
    mask_builder = MaskBuilder(ENDS, new_stats(), clock)
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
    other, mask_builder = Grammars(file, VOCAB, ends), MaskBuilder(ends, new_stats(), clock)
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


@pytest.mark.parametrize("loses", [False, True], ids=["refused", "lost"])
def test_masks_that_a_worker_does_not_write_are_computed_here(
    grammars: Grammars, loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MaskMemory()
    out = memory.allocate(4, WORDS)
    link = InlineLink(grammars, memory)
    workers = WorkerPool(1, lambda: link)
    mask_builder = MaskBuilder(ENDS, new_stats(), FakeClock(), workers=workers, memory=memory)
    text = LLMatcher.grammar_from_regex("[a-z]{3}")
    compiled = grammars.compile(text)
    compiled.add_remote(workers.compile(text, []))
    held = [compiled.constraint(ignore_ends=False) for _ in range(3)]
    tokens = [grammars.prepare().tokenize_str(letter)[0] for letter in "abc"]
    if loses:
        link.lose("is gone")
    else:
        monkeypatch.setattr("tandem.engine_core.constraints.workers.worker.SLOW_SECONDS", -1.0)
    for _ in range(2):
        mask_builder.fill([(each, index) for index, each in enumerate(held, 1)], out)
        for index, (each, token) in enumerate(zip(held, tokens, strict=True), 1):
            assert token in allowed(out[index]) and not set(ENDS) & set(allowed(out[index]))
            assert each.remote is None and each.accept(token)
    assert link.num_open == 0


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_masks_of_many_rows_are_those_of_matchers_compiled_alone(
    grammars: Grammars, mask_builder: MaskBuilder, name: str
) -> None:
    """At random walks over every schema."""
    random, rows, steps = Random(name), 60, 20
    text = LLMatcher.grammar_from_json_schema(SCHEMAS[name])
    compiled = grammars.compile(text)
    held = [compiled.constraint(ignore_ends=False) for _ in range(rows)]
    alone = [LLMatcher(grammars.prepare(), text, log_level=0) for _ in range(rows)]
    out = masks(rows)
    for _ in range(steps):
        indices = random.sample(range(rows), rows)
        mask_builder.fill(list(zip(held, indices, strict=True)), out)
        for row, (constraint, reference) in enumerate(zip(held, alone, strict=True)):
            mask = out[indices[row]]
            assert mask.tobytes() == reference.compute_bitmask(), f"{name}, row {row}"
            token = random.choice(allowed(mask))
            assert constraint.accept(token) and reference.consume_token(token)
            if constraint.is_complete:
                held[row] = compiled.constraint(ignore_ends=False)
                alone[row] = LLMatcher(grammars.prepare(), text, log_level=0)
