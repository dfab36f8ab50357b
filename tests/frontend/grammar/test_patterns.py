"""Character classes of patterns, as strings of JSON are held to them."""

import itertools
import json
import re

import pytest

from tandem.frontend.grammar.grammar import schema_grammar
from tandem.frontend.grammar.patterns import exact_classes
from tests.support.byte_grammar import verdict

TEXTS = ["", *map("".join, itertools.product('a]\\"\n\x01é1/', repeat=1)), "a\\", 'a"', '"a', "\\a", "ab", 'a"b', '\\"']


def spellings(text: str) -> list[str]:
    """Return the ways in which JSON may spell a text."""
    each = [{json.dumps(one, ensure_ascii=False)[1:-1], f"\\u{ord(one):04x}", f"\\u{ord(one):04X}"} for one in text]
    return [f'"{"".join(parts)}"' for parts in itertools.product(*each)]


PATTERNS = [
    r'^[^"]*$', r"^[^\\]*$", r'^[^"\\]*$', r'[^"]', r'^[^"]+$', r'^[^"]{2}$', r'^[^"\n]*$', r"^[^\\\n]*$", r'^[^\]"]*$',
    r'^(?:[^"]|"a)*$', r'^[^"\n][^\\\n]?$', r"^[^\[\\]*$", r'^"[^"]*"$', r'^[^/"]*[^\\]$', r'^[^"é]*$', r"^[\x00-!]*$",
    r"^[#-\uffff\x00-\x1f]*$", r"^[\x00-\x1f]*$", r"^[\x00-!#-\[\]-\uffff]*$", r'^[^"a-z]*$', r'^[^\d"]*$',
    # operators of the compiler's classes
    r'^[^[\]"]*$', r"^[[\]]*$", r'^[^["]*$', r'^[^"--]*$', r"^[a&&b]*$", r'^[^"~~]*$', r'^[^"&&1]*$',
    # exact without help
    r"^.*$", r"^[^\n]*$", r"^[^a]*$", r"^\S*$", r"^[\s\S]*$", r"^[ -~]*$", r"^\\*$", r'^["\\]+$', r"^[^\s\\]*$",
    r"^a\[b$",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_strings_are_those_that_the_pattern_matches(pattern: str) -> None:
    text = schema_grammar({"type": "string", "pattern": pattern}, "p", "'p'").text
    for value in TEXTS:
        accepted = [spelling for spelling in spellings(value) if verdict(text, spelling) == "whole"]
        assert bool(accepted) == bool(re.search(pattern.replace("$", r"\Z"), value)), value


@pytest.mark.parametrize("name", ["patternProperties", "propertyNames"])
def test_names_are_those_that_the_pattern_matches(name: str) -> None:
    names = {"patternProperties": {'^[^"]*$': {}}, "additionalProperties": False}
    schema = {"type": "object", **(names if name == "patternProperties" else {name: {"pattern": '^[^"]*$'}})}
    text = schema_grammar(schema, "p", "'p'").text
    assert verdict(text, '{"a\\\\": 1}') == "whole"
    assert verdict(text, '{"a\\"": 1}') == "wrong"


def test_a_length_does_not_change_what_is_excluded() -> None:
    schema = {"type": "string", "pattern": '^[^"]*$', "maxLength": 3}
    text = schema_grammar(schema, "p", "'p'").text
    assert [verdict(text, each) for each in ('"abc"', '"a\\""', '"abcd"')] == ["whole", "wrong", "wrong"]


@pytest.mark.parametrize(
    "pattern", ["", "abc", r"\[^\"]", "[a-z]+", "[^a", r"a\\", "\\", r"^\d{3}[-. ]\w*$", "[]", "[" * 99999]
)
def test_other_patterns_are_unchanged(pattern: str) -> None:
    assert exact_classes(pattern) == pattern
