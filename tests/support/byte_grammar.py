"""Follow a grammar byte by byte, as the engine follows it token by token."""

import re
from collections.abc import Mapping
from functools import cache

import llguidance

from tandem.frontend.grammar.worker import ByteTokenizer


@cache
def _tokenizer(special: tuple[tuple[str, int], ...]) -> tuple[ByteTokenizer, llguidance.LLTokenizer]:
    vocabulary = ByteTokenizer(600, {token_id: text for text, token_id in special})
    return vocabulary, llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), slices=[])


def verdict(grammar: str, text: str, special: Mapping[str, int] | None = None) -> str:
    """Classify a text under a grammar: "whole", only the "beginning" of a valid text, or "wrong".

    Special tokens in the text are matched as tokens. Asserts that the grammar compiles.
    """
    special = special or {}
    vocabulary, tokenizer = _tokenizer(tuple(special.items()))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    ids: list[int] = []
    for part in parts:
        ids += [special[part]] if part in special else vocabulary(part)
    if matcher.validate_tokens(ids) < len(ids):
        return "wrong"
    assert not ids or matcher.consume_tokens(ids), matcher.get_error()
    return "whole" if matcher.is_accepting() else "beginning"
