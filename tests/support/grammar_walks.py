"""Random tokens for matchers: most that a grammar allows, some that it does not."""

import json
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import Grammars

LONG = "abcdefghijklmnopqrstuvwxyz" * 6
"""Text of more than 60 tokens of the default model's tokenizer, whichever follow each other in it."""


def fixed_record(**properties: Any) -> str:
    """Return a schema without choice of white space, whose names and punctuation are forced."""
    compact = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        "x-guidance": compact,
    }  # fmt: skip
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


WALKED = {
    "letters": LLMatcher.grammar_from_regex("[a-d]{1,30}"),
    "words": LLMatcher.grammar_from_regex("[a-z]{2,6}( [a-z]{2,6}){0,9}"),
    "few ends": LLMatcher.grammar_from_regex("(yes|no|maybe so)"),
    "one text": LLMatcher.grammar_from_regex("There is exactly one way to say this"),
    "one long text": LLMatcher.grammar_from_regex("[ab]" + LONG + "[cd]" + LONG[::-1]),
    "a choice and its end": LLMatcher.grammar_from_regex("(first|second) and then the end"),
    "record": fixed_record(name={"type": "string", "maxLength": 6}, kind={"enum": ["circle", "square"]}),
    "long record": fixed_record(**{LONG: {"type": "boolean"}, LONG[::-1]: {"type": "string", "maxLength": 3}}),
    "array": LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 4}),
}
"""Grammars by name: with forced texts at their start, between choices and at their end, and without."""


def first_matchers(grammars: Grammars) -> list[LLMatcher]:
    """Compile all of `WALKED`; return each one's matcher at its start."""
    return [grammars.compile(text).first for text in WALKED.values()]


def mask_of(matcher: LLMatcher, words: int) -> list[int]:
    """Return the words of a matcher's mask."""
    mask = np.zeros(words, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask.tolist()


def allowed_tokens(matcher: LLMatcher) -> list[int]:
    """Return the tokens that a matcher allows next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def next_token(random: Random, matcher: LLMatcher, vocab_size: int, strays: float = 0.02) -> int:
    """Return a token for a matcher: one that it forces, one that it allows, or, with some probability, any."""
    if random.random() < strays:
        return random.choice([2, 5, random.randrange(vocab_size), vocab_size, vocab_size + 7])
    if (forced := matcher.compute_ff_tokens()) and random.random() < 0.95:
        return forced[0]
    return random.choice(allowed_tokens(matcher) or [2])
