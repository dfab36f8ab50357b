"""Matchers of grammars over one model's tokenizer.

No other module constructs objects of llguidance.
"""

import threading
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem.engine_core.constraints.tokenizer_file import tokenizer_source
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.params import LEXER_STEP_FUEL, MAX_GRAMMAR_SYMBOLS, MAX_LEXER_STATES, MAX_PARSER_ITEMS

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
"""A character that needs no escape in a JSON string."""
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in (4, 6, 8, 10, 15, 30)),
    f"{_IN_STRING}+",
)
"""Kinds of tokens that a mask allows as a whole where the grammar does; the others are looked up one by one. With the
library's own lengths, 10 and 30, a mask shortly before the end of a string of limited length takes up to a millisecond
at 128k tokens; with these, masks of such records take a third less on average."""


class Matchers:
    """Compile grammars for one model's tokenizer.

    Every method may run on any thread.

    The tokenizer is built once, on first use. That takes 30 ms for 4,096 tokens and 1.3 s for 128,000 on one slow core,
    and llguidance holds the interpreter lock meanwhile, so `prepare` should run on another thread while the weights
    load, before there are streams to delay.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        """Keep the facts from which the tokenizer is built.

        vocab_size: size of the model's vocabulary, which may be larger or smaller than the tokenizer's: ids that only
        one of them has are never allowed; end_ids: ids allowed wherever a grammar may end; empty: the tokenizer's own
        end id.
        """
        self.tokenizer_file = tokenizer_file
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def prepare(self) -> LLTokenizer:
        """Return the model's tokenizer, loaded once.

        Raises RequestError if its folder has no usable one.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def matcher(self, grammar: str) -> LLMatcher:
        """Compile a grammar and compute its first mask.

        A matcher that failed has an error.
        """
        limits = LLParserLimits(
            verbose_errors=False,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            max_lexer_states=MAX_LEXER_STATES,
            step_lexer_fuel=LEXER_STEP_FUEL,
            step_max_items=MAX_PARSER_ITEMS,
        )
        matcher = LLMatcher(self.prepare(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def _load(self) -> LLTokenizer:
        if not self.tokenizer_file.is_file():
            raise _unusable("the model's folder has no tokenizer.json")
        try:
            return LLTokenizer(
                tokenizer_source(self.tokenizer_file, self.vocab_size),
                n_vocab=self.vocab_size,
                eos_token=[token for token in self.end_ids if token < self.vocab_size] or None,
                slices=list(SLICES),
            )
        except ValueError as error:
            raise _unusable(f"the model's tokenizer.json cannot be used ({error})") from error


def _unusable(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"constrained output is not available: {why}")


def reason(error: str) -> str:
    """Return the reason of a matcher's error, without the parser's dump."""
    return error.removesuffix("<non-verbose/>").strip()
