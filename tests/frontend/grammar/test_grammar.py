"""Grammars built from request fields: the texts they accept, and the fields that are rejected."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar.grammar import (
    THINK_TAGS,
    Grammar,
    escape_regex_characters,
    output_grammar,
    regex_position,
)
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.support.byte_grammar import verdict


def of(
    response_format: dict[str, Any] | None = None,
    regex: str | None = None,
    choice: tuple[str, ...] = (),
    grammar: str | None = None,
) -> Grammar:
    made = output_grammar(response_format, regex, choice, grammar)
    assert made is not None
    return made


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        of(**fields)
    return caught.value


def schema_format(schema: object, **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


def test_output_grammar_is_none_for_free_text() -> None:
    assert output_grammar(None, None, (), None) is None
    assert output_grammar({"type": "text"}, None, (), None) is None
    assert output_grammar({"type": "text"}, "a", (), None) is not None


@pytest.mark.parametrize(
    ("regex", "text", "expected"),
    [
        ("[a-z]+", "abc", "whole"),
        ("[a-z]+", "", "beginning"),
        ("[a-z]+", "aB", "wrong"),
        ("a{3}", "aa", "beginning"),
        (".+", "a\nb", "wrong"),
        ("(?s).+", "a\nb", "whole"),
        ("^ab$", "ab", "whole"),
        ("a/b", "a/b", "whole"),
        (r"a\/b", "a/b", "whole"),
        (r"a\\/b", "a\\/b", "whole"),
        ("[/]+", "//", "whole"),
        ("a\nb", "a\nb", "whole"),
        ("a\\\nb", "a\nb", "whole"),
        ('"#%', '"#%', "whole"),
        (r"\d{2}-\w+", "12-é", "whole"),
        (r"\p{Greek}+", "αβ", "whole"),
        ("é{2}🙂", "éé🙂", "whole"),
        ("é", "e", "wrong"),
        ("a|b|", "", "whole"),
    ],
)
def test_regex_constrains_the_whole_output(regex: str, text: str, expected: str) -> None:
    assert verdict(of(regex=regex).text, text) == expected


@given(text=st.text(max_size=20).filter(lambda text: "\\" not in text))
def test_regex_of_an_escaped_text_matches_the_text(text: str) -> None:
    assert verdict(of(regex=re.escape(text) or "()").text, text) == "whole"


@given(regex=st.text(alphabet="ab/\\\n", max_size=12))
def test_regex_position_maps_escaped_offsets_to_characters(regex: str) -> None:
    try:
        pieces = escape_regex_characters(regex)
    except ApiError:
        assert len(regex) - len(regex.rstrip("\\")) in range(1, 13, 2)
        return
    assert len(pieces) == len(regex)
    assert "\n" not in "".join(pieces)
    offset = len("(?-s)")
    for index, piece in enumerate(pieces):
        assert regex_position(regex, offset) == index
        offset += len(piece)


@pytest.mark.parametrize(
    "text", ["plain", 'a"b', "a\\b", "a\nb", "\t", "\x00", "\x7f", "é", "🙂", "\u2028", "a/b", "%json {}", "<|end|>"]
)
def test_choice_accepts_exactly_its_texts(text: str) -> None:
    grammar = of(choice=(text, "other")).text
    assert verdict(grammar, text) == "whole"
    assert verdict(grammar, "other") == "whole"
    assert verdict(grammar, text + "x") == "wrong"


def test_lark_grammar_is_followed() -> None:
    text = of(grammar='start: "a" rest\nrest: /[0-9]+/ | %json {"type": "null"}').text
    assert [verdict(text, output) for output in ("a12", "anull", "a", "b")] == ["whole", "whole", "beginning", "wrong"]


def test_grammar_in_the_compilers_own_format_is_treated_as_lark() -> None:
    made = of(grammar='{"grammars": [{"json_schema": {}}]}')
    assert made.body == {"lark_grammar": '{"grammars": [{"json_schema": {}}]}'}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "whole"),
        ('{"a": [1, {"b": null}]}', "whole"),
        ('{"a": [1', "beginning"),
        ("[]", "wrong"),
        ("{} ", "wrong"),
        ('{\n  "a": 1\n}', "whole"),
        ("{  }", "wrong"),
    ],
)
def test_json_object_accepts_any_object_and_nothing_else(text: str, expected: str) -> None:
    assert verdict(of({"type": "json_object"}).text, text) == expected


def test_json_schema_is_enforced_whether_strict_or_not() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for strict in (True, False, None):
        text = of(schema_format(schema, strict=strict, description="d")).text
        assert verdict(text, '{"a":1}') == verdict(text, '{\n  "a" : 1 }') == "whole"
        assert verdict(text, '{"b') == verdict(text, '{"a": 1, "b') == "wrong"


def test_json_whitespace_is_bounded() -> None:
    text = of({"type": "json_object"}).text
    assert verdict(text, "{\n" + 32 * " ") == "beginning"
    assert verdict(text, "{\n" + 33 * " ") == "wrong"
    assert verdict(text, "{\n\n") == "wrong"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"regex": "a", "choice": ("b",)}, 400, "choice"),
        ({"response_format": {"type": "json_object"}, "grammar": "start: /a/"}, 400, "grammar"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {}}, 400, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, 400, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
        ({"response_format": schema_format([])}, 400, "response_format.json_schema.schema"),
        ({"response_format": schema_format({}, strict="yes")}, 400, "response_format.json_schema.strict"),
        ({"response_format": schema_format({}, foo=1)}, 400, "response_format.json_schema.foo"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            400,
            "response_format.json_schema.name",
        ),
        ({"response_format": schema_format({"type": "thing"}, strict=True)}, 400, "response_format.json_schema.schema"),
        ({"regex": "ab\\"}, 400, "regex"),
    ],
)
def test_output_grammar_rejects_invalid_fields(fields: dict[str, Any], status: int, param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (status, param)


def test_error_names_both_fields_that_cannot_be_combined() -> None:
    error = refusal(regex="a", choice=("b",))
    assert "'regex'" in error.message and "'choice'" in error.message


SPECIAL = {"<think>": 300, "</think>": 301}


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize("made", [of({"type": "json_object"}), of(regex="a+"), of(choice=("yes", "no"))])
def test_reasoning_precedes_the_grammar(made: Grammar, special: dict[str, int]) -> None:
    answer = {"response_format": "{}", "regex": "aa", "choice": "yes"}[made.param]
    opened, closed = made.after_thinking(True, special), made.after_thinking(False, special)
    reasoning = "<think>hm { no\n</think>\n\n"
    assert verdict(closed, answer, special) == "whole"
    assert verdict(closed, reasoning + answer, special) == "whole"
    assert verdict(closed, reasoning + "?", special) == "wrong"
    assert verdict(opened, answer, special) == "beginning"
    assert verdict(opened, reasoning.removeprefix("<think>") + answer, special) == "whole"


def test_only_the_token_of_a_tag_ends_reasoning_for_the_engine(tmp_path: Path) -> None:
    """An added token that is not special can be spelled by other tokens, which the engine's matcher knows as text."""
    raw = byte_level_tokenizer()
    raw.add_tokens([AddedToken(tag, special=False) for tag in THINK_TAGS.texts])
    raw.save(str(tmp_path / "tokenizer.json"))
    ids = {tag: raw.token_to_id(tag) for tag in THINK_TAGS.texts}
    grammar = output_grammar(None, None, ["yes"], None)
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer(str(tmp_path / "tokenizer.json")), grammar.after_thinking(True, ids))
    spelled = [raw.token_to_id(character) for character in THINK_TAGS.end]
    thought = [*raw.encode("Hm", add_special_tokens=False).ids, *spelled]
    yes = raw.encode("yes", add_special_tokens=False).ids
    assert matcher.validate_tokens([*thought, *yes, *spelled]) == len(thought) + len(yes) + len(spelled)
    assert matcher.validate_tokens([*thought, ids[THINK_TAGS.end], *yes]) == len(thought) + 1 + len(yes)
    assert matcher.validate_tokens([*thought, ids[THINK_TAGS.end], *spelled]) == len(thought) + 1
