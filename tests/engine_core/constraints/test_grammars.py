"""Grammars that compile and those that do not, and the state of a constraint."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import CROWDED, Grammars
from tandem.engine_core.errors import RequestError
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.frontend.grammar.json_schema import OPTIONS, with_options
from tandem.protocol.errors import ErrorCode
from tandem.protocol.params import MAX_GRAMMAR_SYMBOLS, MAX_PARSER_ITEMS
from tests.engine_core.constraints.conftest import ENDS, VOCAB

REGEX, SCHEMA = LLMatcher.grammar_from_regex, LLMatcher.grammar_from_json_schema


def ids(grammars: Grammars, text: str) -> list[int]:
    return grammars.prepare().tokenize_str(text)


def test_tokenizer_is_built_once_with_the_models_vocabulary(grammars: Grammars) -> None:
    tokenizer = grammars.prepare()
    assert grammars.prepare() is tokenizer
    assert (tokenizer.vocab_size, tokenizer.eos_tokens) == (VOCAB, list(ENDS))


@pytest.mark.parametrize("limits", [{}, {"maxLength": 3}, {"maxLength": 12}, {"minLength": 5, "maxLength": 33}])
def test_masks_of_strings_are_those_that_look_up_every_token(grammars: Grammars, limits: dict[str, int]) -> None:
    """Slices of tokens save time and change no mask."""
    tokenizer, random = grammars.prepare(), Random(3)
    grammar = SCHEMA({"type": "array", "items": {"type": "string", **limits}, "minItems": 100})
    quick, slow = (LLMatcher(each, grammar) for each in (tokenizer, tokenizer.with_slices([])))
    for _ in range(60):
        mask = quick.compute_bitmask()
        assert mask == slow.compute_bitmask()
        allowed = [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1]
        token = random.choice(allowed)
        assert quick.consume_token(token) and slow.consume_token(token)


def test_model_without_end_ids_uses_its_tokenizers(grammars: Grammars) -> None:
    tokenizer = Grammars(grammars.tokenizer_file, VOCAB, ()).prepare()
    assert tokenizer.is_special_token(tokenizer.eos_token)


def test_constraint_follows_a_grammar_from_start_to_end(grammars: Grammars) -> None:
    constraint = grammars.compile(REGEX("ab(cd)?")).constraint(ignore_ends=False)
    for token in ids(grammars, "ab"):
        assert not constraint.is_complete
        assert constraint.matcher.consume_token(token)
    assert not constraint.is_complete, "it may end, and it may go on"
    for token in ids(grammars, "cd"):
        assert constraint.matcher.consume_token(token)
    assert constraint.is_complete
    assert constraint.problem == ""


@pytest.mark.parametrize("end", ENDS)
def test_every_end_id_ends_a_grammar_that_may_end_there(grammars: Grammars, end: int) -> None:
    constraint = grammars.compile(REGEX("a*")).constraint(ignore_ends=False)
    assert constraint.is_end(end)
    assert not constraint.is_end(ids(grammars, "a")[0])
    assert constraint.matcher.consume_token(end)
    assert constraint.is_complete


def test_fast_forward_tokens_do_not_change_the_state(grammars: Grammars) -> None:
    constraint = grammars.compile(REGEX("exactly this text")).constraint(ignore_ends=False)
    assert constraint.fast_forward_tokens() == constraint.fast_forward_tokens() == ids(grammars, "exactly this text")
    assert constraint.matcher.consume_tokens(constraint.fast_forward_tokens())
    assert constraint.is_complete
    assert constraint.fast_forward_tokens() == []


def test_constraints_of_one_compiled_grammar_are_independent(grammars: Grammars) -> None:
    compiled_grammar = grammars.compile(REGEX("[ab]c"))
    one, other = compiled_grammar.constraint(False), compiled_grammar.constraint(False)
    assert one.matcher.consume_tokens(ids(grammars, "a") + ids(grammars, "c"))
    assert (one.is_complete, other.is_complete) == (True, False)


def test_rejected_token_gives_a_problem_of_one_line(grammars: Grammars) -> None:
    constraint = grammars.compile(REGEX("[0-9]+")).constraint(ignore_ends=False)
    assert not constraint.matcher.consume_token(ids(grammars, "z")[0])
    assert "doesn't satisfy the grammar" in constraint.problem
    assert "\n" not in constraint.problem


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("garbage {", "Expected token"),
        (REGEX("a(b"), "unclosed group"),
        (SCHEMA({"type": "strinx"}), "strinx"),
        (SCHEMA({"type": "object", "properties": {"a": False}, "required": ["a"]}), "unsatisfiable"),
        (SCHEMA({"$ref": "#/definitions/nowhere"}), "nowhere"),
        ('start: "a" missing_rule', "missing_rule"),
        ("", "Empty grammar"),
    ],
)
def test_invalid_grammar_raises_with_its_reason(grammars: Grammars, grammar: str, named: str) -> None:
    with pytest.raises(RequestError, match=r"^the grammar does not compile: .") as caught:
        grammars.compile(grammar)
    assert caught.value.code is ErrorCode.INVALID_GRAMMAR
    assert named in caught.value.message


def test_oversized_grammar_is_rejected(grammars: Grammars) -> None:
    words = " | ".join(f'"{number}" next' for number in range(MAX_GRAMMAR_SYMBOLS))
    with pytest.raises(RequestError, match=f"too big .*{MAX_GRAMMAR_SYMBOLS}"):
        grammars.compile(f'start: {words}\nnext: "q" | start')


def test_lexer_that_would_grow_without_bound_is_rejected(grammars: Grammars) -> None:
    """Return three hundred terminals that differ before and after one letter, so that lexer states multiply."""
    rng = Random(0)
    terms = [f"T{i}: /[a-z ]*{rng.choice('abcdefghij')}[a-z ]{{{rng.randrange(20)}}}/" for i in range(300)]
    starts = "|".join(f"T{i}" for i in range(300))
    with pytest.raises(RequestError, match="does not compile") as caught:
        grammars.compile(LLMatcher.grammar_from_lark(f"start: ({starts})*\n" + "\n".join(terms)))
    assert caught.value.code is ErrorCode.INVALID_GRAMMAR


def test_ambiguous_grammar_ends_at_the_limit_on_parser_items(grammars: Grammars) -> None:
    """With llguidance's own limit each of its masks takes up to seconds, on the loop's thread."""
    ways = " | ".join("s " * number for number in range(2, 5))
    text = LLMatcher.grammar_from_lark(f"start: s\ns: {ways} | /[a-z]/ | /[a-z]+/ | /./")
    constraint = grammars.compile(text).constraint(ignore_ends=False)
    for token in ids(grammars, "Neither is what it seems; 7 of 9 (or 10) agree, and none of them knows why. " * 4):
        constraint.matcher.compute_bitmask()
        if constraint.problem:
            break
        assert constraint.accept(token)
    assert f"Too many items (limit {MAX_PARSER_ITEMS}" in constraint.problem
    assert not constraint.accept(ENDS[0])


def test_large_but_plain_schemas_stay_below_the_limit_on_parser_items(grammars: Grammars) -> None:
    names = {f"name{number}": {"type": ["string", "integer", "null"]} for number in range(490)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    constraint = grammars.compile(SCHEMA(with_options(schema, OPTIONS))).constraint(ignore_ends=False)
    for token in ids(grammars, json.dumps(dict.fromkeys(list(names)[::9], "x, y"), indent=2)):
        constraint.matcher.compute_bitmask()
        assert constraint.accept(token), constraint.problem
    assert not constraint.problem


def test_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the model's folder has no tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", VOCAB, ENDS).compile(REGEX("a"))


def test_unusable_tokenizer_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(RequestError, match="cannot be used") as caught:
        Grammars(file, VOCAB, ENDS).compile(REGEX("a"))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    shutil.copy(DEFAULT_MODEL / "tokenizer.json", file)
    with pytest.raises(RequestError, match="vocab size too small; 4000 vs 4096"):
        Grammars(file, 4000, ENDS).compile(REGEX("a"))


class TestBases:
    """A grammar of many sequences, compiled several times."""

    def test_sequences_fill_one_base_before_the_next(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        first = [compiled.constraint(ignore_ends=False) for _ in range(CROWDED - 1)]
        assert not compiled.is_crowded
        last = compiled.constraint(ignore_ends=False)
        assert compiled.is_crowded
        compiled.add_base(grammars.compile(REGEX("[a-z]+")).bases[0].matcher)
        assert not compiled.is_crowded
        later = [compiled.constraint(ignore_ends=False) for _ in range(CROWDED)]
        assert {len(base.constraints) for base in compiled.bases} == {CROWDED}
        assert compiled.is_crowded
        assert len({id(each.matcher) for each in (*first, last, *later)}) == 2 * CROWDED

    def test_ended_sequences_leave_room(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        held = [compiled.constraint(ignore_ends=False) for _ in range(CROWDED)]
        assert compiled.is_crowded
        del held[3]
        assert not compiled.is_crowded

    def test_added_base_takes_its_share_of_sequences_without_tokens(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        held = [compiled.constraint(ignore_ends=False) for _ in range(10)]
        (token,) = ids(grammars, "a")
        for begun in held[:4]:
            assert begun.accept(token)
        compiled.add_base(grammars.compile(REGEX("[a-z]+")).bases[0].matcher)
        old, new = compiled.bases
        assert len(old.constraints) == len(new.constraints) == 5
        assert all(each.base is old for each in held[:4])
        assert all(each in each.base.constraints for each in held)
        compiled.add_base(grammars.compile(REGEX("[a-z]+")).bases[0].matcher)
        assert len(compiled.bases[2].constraints) == 3
        assert sum(len(base.constraints) for base in compiled.bases) == 10

    def test_sequence_that_begun_stays(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        held = [compiled.constraint(ignore_ends=False) for _ in range(3)]
        (token,) = ids(grammars, "a")
        assert all(each.accept(token) for each in held)
        compiled.add_base(grammars.compile(REGEX("[a-z]+")).bases[0].matcher)
        assert not compiled.bases[1].constraints

    def test_added_base_goes_with_the_last_of_its_sequences(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        held = [compiled.constraint(ignore_ends=False) for _ in range(CROWDED)]
        for _ in range(2):
            compiled.add_base(grammars.compile(REGEX("[a-z]+")).bases[0].matcher)
        assert len(compiled.bases) == 3
        newest = compiled.bases[2]
        held = [each for each in held if each.base is not newest]
        del newest
        assert len(compiled.bases) == 2
        held.clear()
        assert len(compiled.bases) == 1

    def test_added_base_waits_for_its_first_sequence(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        held = [compiled.constraint(ignore_ends=False) for _ in range(CROWDED)]
        (token,) = ids(grammars, "a")
        assert all(each.accept(token) for each in held)
        compiled.add_base(grammars.compile(REGEX("[a-z]+")).bases[0].matcher)
        assert len(compiled.bases) == 2
        held.append(compiled.constraint(ignore_ends=False))
        assert held[-1].base is compiled.bases[1]
        held.pop()
        assert len(compiled.bases) == 1
