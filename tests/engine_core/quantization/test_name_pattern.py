"""Patterns of module names: those that may take long are refused, and all others match as Python's `re` does."""

import re

import pytest

from tandem.engine_core.quantization.name_pattern import NamePattern, PatternError

NAMES = (
    "model.layers.3.mlp.gate",
    "model.layers.31.self_attn.q_proj",
    "lm_head",
    "model.layers.3.mlp.experts.7.up_proj",
)
USUAL = (
    r".*layers\.3\.mlp\.gate$", r"model\.layers\.([0-2]|3)\..*", r"(?i).*MLP.*", r".*\.(q|k|v)_proj", "lm_head|.*gate",
    r"(?:model\.)?layers", r".*layers\.\d{1,2}\.mlp", r"(.)\1", "", r"^(?!.*mlp).*",
    r".*layers\.\d+\..*\.[0-9]+.*proj.*", r".*(?:up|down)_proj.*",
)  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
@pytest.mark.parametrize("anywhere", [False, True])
def test_patterns_match_as_regular_expressions_do(pattern: str, anywhere: bool) -> None:
    found = NamePattern.compile(pattern, pattern, anywhere)
    match = re.search if anywhere else re.match
    for name in NAMES:
        assert (found.literal in name and found.matches((name,), name)) == (match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.?)+X", "(.*)*x", "(a|a)*b", r"(?:\w\w?)+X", "((a{0,9}){0,9})b", "(?=(a+)+b)", "(a+)+?b", ".*" * 5, "(",
        "a" * 5000, "(" * 5000, r"(?:x|(\w+\.?)+)y",
    ],
)  # fmt: skip
def test_invalid_and_slow_expressions_are_refused_by_their_entry(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"^the entry$"):
        NamePattern.compile(pattern, "the entry")
