"""Grammars that compile and those that do not, and the state of a constraint."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import CROWDED, WORKERS_SHARE, Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar
from tandem.engine_core.errors import RequestError
from tandem.engine_core.stats import new_stats
from tandem.frontend.grammar.json_schema import OPTIONS, with_options
from tandem.protocol.errors import ErrorCode
from tandem.protocol.params import MAX_GRAMMAR_SYMBOLS, MAX_PARSER_ITEMS
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.inline_link import InlineLink

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
        assert constraint.accept(token)
    assert not constraint.is_complete, "it may end, and it may go on"
    for token in ids(grammars, "cd"):
        assert constraint.accept(token)
    assert constraint.is_complete
    assert constraint.problem == ""


@pytest.mark.parametrize("end", ENDS)
def test_every_end_id_ends_a_grammar_that_may_end_there(grammars: Grammars, end: int) -> None:
    constraint = grammars.compile(REGEX("a*")).constraint(ignore_ends=False)
    assert constraint.is_end(end)
    assert not constraint.is_end(ids(grammars, "a")[0])
    assert constraint.accept(end)
    assert constraint.is_complete


def test_fast_forward_tokens_do_not_change_the_state(grammars: Grammars) -> None:
    constraint = grammars.compile(REGEX("exactly this text")).constraint(ignore_ends=False)
    assert constraint.fast_forward_tokens() == constraint.fast_forward_tokens() == ids(grammars, "exactly this text")
    assert all(constraint.accept(token) for token in constraint.fast_forward_tokens())
    assert constraint.is_complete
    assert constraint.fast_forward_tokens() == []


def test_constraints_of_one_compiled_grammar_are_independent(grammars: Grammars) -> None:
    compiled_grammar = grammars.compile(REGEX("[ab]c"))
    one, other = compiled_grammar.constraint(False), compiled_grammar.constraint(False)
    assert all(one.accept(token) for token in ids(grammars, "a") + ids(grammars, "c"))
    assert (one.is_complete, other.is_complete) == (True, False)


def test_rejected_token_gives_a_problem_of_one_line(grammars: Grammars) -> None:
    constraint = grammars.compile(REGEX("[0-9]+")).constraint(ignore_ends=False)
    assert not constraint.accept(ids(grammars, "z")[0])
    assert "satisfy the grammar" in constraint.problem
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
    with pytest.raises(RequestError, match=r"\S:\s.") as caught:
        grammars.compile(grammar)
    assert caught.value.code is ErrorCode.INVALID_GRAMMAR
    assert named in caught.value.message


def test_oversized_grammar_is_rejected(grammars: Grammars) -> None:
    words = " | ".join(f'"{number}" next' for number in range(MAX_GRAMMAR_SYMBOLS))
    with pytest.raises(RequestError, match=rf"\b{MAX_GRAMMAR_SYMBOLS}\b"):
        grammars.compile(f'start: {words}\nnext: "q" | start')


def test_lexer_that_would_grow_without_bound_is_rejected(grammars: Grammars) -> None:
    """Return three hundred terminals that differ before and after one letter, so that lexer states multiply."""
    rng = Random(0)
    terms = [f"T{i}: /[a-z ]*{rng.choice('abcdefghij')}[a-z ]{{{rng.randrange(20)}}}/" for i in range(300)]
    starts = "|".join(f"T{i}" for i in range(300))
    with pytest.raises(RequestError) as caught:
        grammars.compile(LLMatcher.grammar_from_lark(f"start: ({starts})*\n" + "\n".join(terms)))
    assert caught.value.code is ErrorCode.INVALID_GRAMMAR


def test_ambiguous_grammar_ends_at_the_limit_on_parser_items(grammars: Grammars) -> None:
    """With llguidance's own limit each of its masks takes up to seconds, on the loop's thread."""
    ways = " | ".join("s " * number for number in range(2, 5))
    builder, mask = MaskBuilder(ENDS, new_stats(), FakeClock()), np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    text = LLMatcher.grammar_from_lark(f"start: s\ns: {ways} | /[a-z]/ | /[a-z]+/ | /./")
    constraint = grammars.compile(text).constraint(ignore_ends=False)
    for token in ids(grammars, "Neither is what it seems; 7 of 9 (or 10) agree, and none of them knows why. " * 4):
        builder.fill([(constraint, 0)], mask)
        if constraint.problem:
            break
        assert constraint.accept(token)
    assert f"(limit {MAX_PARSER_ITEMS}" in constraint.problem
    assert not constraint.accept(ENDS[0])


def test_large_but_plain_schemas_stay_below_the_limit_on_parser_items(grammars: Grammars) -> None:
    builder, mask = MaskBuilder(ENDS, new_stats(), FakeClock()), np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    names = {f"name{number}": {"type": ["string", "integer", "null"]} for number in range(490)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    constraint = grammars.compile(SCHEMA(with_options(schema, OPTIONS))).constraint(ignore_ends=False)
    for token in ids(grammars, json.dumps(dict.fromkeys(list(names)[::9], "x, y"), indent=2)):
        builder.fill([(constraint, 0)], mask)
        assert constraint.accept(token), constraint.problem
    assert not constraint.problem


def test_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"\btokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", VOCAB, ENDS).compile(REGEX("a"))


def test_unusable_tokenizer_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(RequestError, match="tokenizer") as caught:
        Grammars(file, VOCAB, ENDS).compile(REGEX("a"))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


class TestWorkers:
    """A grammar of many sequences, which workers follow too."""

    def link(self, grammars: Grammars) -> InlineLink:
        masks = MaskMemory()
        masks.allocate(1, -(-VOCAB // 32))
        return InlineLink(grammars, masks)

    def remote(self, link: InlineLink) -> RemoteGrammar:
        return RemoteGrammar(link, link.compile(REGEX("[a-z]+")))

    def test_they_are_wanted_for_many_sequences_of_one_grammar_or_of_all(self, grammars: Grammars) -> None:
        compiled, link = grammars.compile(REGEX("[a-z]+")), self.link(grammars)
        assert not compiled.wants_worker(CROWDED - 1)
        assert compiled.wants_worker(CROWDED)
        compiled.add_remote(self.remote(link))
        assert not compiled.wants_worker(10 * CROWDED), "one follows it"
        held = [compiled.constraint(ignore_ends=False) for _ in range(CROWDED + WORKERS_SHARE)]
        assert compiled.num_followed == len(held)
        assert compiled.wants_worker(len(held))
        compiled.add_remote(self.remote(link))
        assert not compiled.wants_worker(len(held))
        del held[0]
        assert compiled.num_followed == len(held)

    def test_none_is_wanted_once_one_has_refused_it(self, grammars: Grammars) -> None:
        compiled = grammars.compile(REGEX("[a-z]+"))
        compiled.keep_here()
        assert not compiled.wants_worker(1000)

    def test_a_worker_takes_its_share_of_sequences_without_tokens(self, grammars: Grammars) -> None:
        compiled, links = grammars.compile(REGEX("[a-z]+")), [self.link(grammars) for _ in range(2)]
        held = [compiled.constraint(ignore_ends=False) for _ in range(10)]
        (token,) = ids(grammars, "a")
        for begun in held[:4]:
            assert begun.accept(token)
        compiled.add_remote(self.remote(links[0]))
        assert [each.remote is not None for each in held] == [False] * 4 + [True] * 6
        assert links[0].num_open == 6
        compiled.add_remote(self.remote(links[1]))
        held += [compiled.constraint(ignore_ends=False) for _ in range(6)]
        assert [link.num_open for link in links] == [6, 6], "the one with the fewest gets the next"
        held.clear()
        assert [link.num_open for link in links] == [0, 0]

    def test_lost_workers_get_nothing_more(self, grammars: Grammars) -> None:
        compiled, link = grammars.compile(REGEX("[a-z]+")), self.link(grammars)
        compiled.add_remote(self.remote(link))
        before = compiled.constraint(ignore_ends=False)
        link.lose("is gone")
        after = compiled.constraint(ignore_ends=False)
        assert after.remote is None and compiled.links == []
        (token,) = ids(grammars, "a")
        assert before.accept(token) and after.accept(token)
        assert before.remote is None

    def test_constraints_of_workers_are_those_of_this_process(self, grammars: Grammars) -> None:
        compiled, link = grammars.compile(REGEX("[a-c]{3}")), self.link(grammars)
        here = compiled.constraint(ignore_ends=False)
        compiled.add_remote(RemoteGrammar(link, link.compile(REGEX("[a-c]{3}"))))
        there = compiled.constraint(ignore_ends=False)
        assert here.remote is not None, "it had no token yet"
        alone = grammars.compile(REGEX("[a-c]{3}")).constraint(ignore_ends=False)
        for letter in "abz":
            (token,) = ids(grammars, letter)
            assert here.accept(token) == there.accept(token) == alone.accept(token)
            assert here.is_complete == there.is_complete == alone.is_complete
            assert here.problem == there.problem == alone.problem
            assert here.fast_forward_tokens() == alone.fast_forward_tokens()
