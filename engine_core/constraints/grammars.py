"""Compiled grammars and their constraints.

This is the only place that constructs objects of llguidance.
"""

import threading
from pathlib import Path
from weakref import WeakSet, ref

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem.engine_core.constraints.mask_budget import MaskCost
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.params import LEXER_STEP_FUEL, MAX_GRAMMAR_SYMBOLS, MAX_LEXER_STATES, MAX_PARSER_ITEMS

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
"""A character that stands for itself in a string of JSON."""
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in (4, 6, 8, 10, 15, 30)),
    f"{_IN_STRING}+",
)
"""Kinds of tokens that a mask allows as a whole where the grammar does; the others are looked up one by one. With the
library's own lengths, 10 and 30, a mask shortly before the end of a string of limited length takes up to a millisecond
at 128k tokens; with these, masks of such records take a third less on average."""


CROWDED = 16
"""Constraints on one base from which on another is worth its tables: each base fills its own wherever its rows reach
states that are new to it. In a string with a `minLength`, where every token leads to one, that takes 0.2 ms a step."""


class GrammarConstraint:
    """Implement `contracts.Constraint` over one llguidance matcher."""

    __slots__ = ("__weakref__", "_ends", "ahead", "base", "cost", "ignore_ends", "is_new", "matcher", "overdrawn")

    def __init__(
        self, matcher: LLMatcher, base: "GrammarBase", ends: frozenset[int], ignore_ends: bool, key: str = ""
    ) -> None:
        """Wrap one matcher.

        matcher: used by this constraint only, a copy of the base's; ends: ids that llguidance allows where the grammar
        may end; key: name of the API key that pays for the masks.
        """
        self.matcher = matcher
        self.base = base
        self.ignore_ends = ignore_ends
        self._ends = ends
        self.cost = MaskCost(key)
        self.ahead: tuple[int, bool] | None = None
        """Token that the matcher got already, and whether it accepted it; None if `accept` is to give it the next."""
        self.is_new = True
        """True until the first token."""
        self.overdrawn = ""
        """Problem of a constraint whose masks took too long; empty before."""

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def problem(self) -> str:
        return self.overdrawn or reason(self.matcher)

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def fast_forward_tokens(self) -> list[int]:
        return self.matcher.compute_ff_tokens()

    def accept(self, token: int) -> bool:
        """Implement `Constraint.accept`; a token outside the vocabulary is rejected."""
        if self.overdrawn:
            return False
        self.is_new = False
        if self.ahead is None:
            accepted = self.matcher.consume_token(token)
        else:
            (ahead, accepted), self.ahead = self.ahead, None
            assert ahead == token, f"token {token} after {ahead} was accepted ahead"
        # A matcher that has failed still consumes end ids.
        return accepted and not (token in self._ends and self.problem)


class GrammarBase:
    """A grammar's matcher at its start, and the constraints that are copies of it.

    Copies share the lexer's tables, and the lock of these, which one holds for the whole of a mask: threads compute
    masks of several bases at once, but not of one.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.constraints: WeakSet[GrammarConstraint] = WeakSet()


class CompiledGrammar:
    """A grammar's matcher at its start, copied for each sequence.

    A copy takes microseconds, a compilation milliseconds. A grammar of many sequences may be compiled several times; a
    base that was added goes with the last of its sequences, since tables can grow by megabytes.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._first = GrammarBase(matcher)
        self._added: list[ref[GrammarBase]] = []
        self._unused: GrammarBase | None = None
        """The newest base while it has no constraint, which would hold it."""
        self._ends = ends

    @property
    def bases(self) -> list[GrammarBase]:
        """The matcher that was compiled first, and those added that are still held."""
        return [self._first, *(base for added in self._added if (base := added()) is not None)]

    @property
    def is_crowded(self) -> bool:
        """True if every base has enough constraints for another one to save time."""
        return all(len(base.constraints) >= CROWDED for base in self.bases)

    def constraint(self, ignore_ends: bool, key: str = "") -> GrammarConstraint:
        """Return a constraint for one sequence.

        It is of the first base that is not crowded, or of that with the fewest.

        ignore_ends: allow end ids only where nothing else is allowed; key: name of the API key, "" for none.
        """
        bases = self.bases
        free = (base for base in bases if len(base.constraints) < CROWDED)
        base = next(free, None) or min(bases, key=lambda base: len(base.constraints))
        if base is self._unused:
            self._unused = None
        constraint = GrammarConstraint(base.matcher.deep_copy(), base, self._ends, ignore_ends, key)
        base.constraints.add(constraint)
        return constraint

    def add_base(self, matcher: LLMatcher) -> None:
        """Add a matcher of the same grammar, compiled apart.

        It gets its share of the constraints, of those that have no token yet.
        """
        added, bases = GrammarBase(matcher), self.bases
        share = sum(len(base.constraints) for base in bases) // (len(bases) + 1)
        for base in bases:
            surplus = min(len(base.constraints) - share, share - len(added.constraints))
            for constraint in [each for each in base.constraints if each.is_new][: max(0, surplus)]:
                base.constraints.remove(constraint)
                constraint.base, constraint.matcher = added, matcher.deep_copy()
                added.constraints.add(constraint)
        self._added = [ref(base) for base in (*bases[1:], added)]
        self._unused = None if added.constraints else added


def reason(matcher: LLMatcher) -> str:
    """Return the reason for a matcher's error state; empty if it has none.

    The parser's dump is left out.
    """
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


class Grammars:
    """Compiler of grammars for one model's tokenizer.

    Every method may run on any thread.

    The tokenizer is built once, on first use. That takes 30 ms for 4,096 tokens and 1.3 s for 128,000 on
    one slow core, and llguidance holds the interpreter lock meanwhile, so `prepare` should run on
    another thread while the weights load, before there are streams to hold up.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        """Keep the facts from which the tokenizer is built.

        vocab_size: size of the model's vocabulary, which may exceed the tokenizer's: ids beyond the tokenizer's are
        never allowed; end_ids: ids allowed wherever a grammar may end; empty: the tokenizer's own end id.
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

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar and compute its first mask.

        Copies then find their tables warm.

        Raises RequestError with llguidance's reason. The limits on grammar, lexer and parser bound the time it takes.
        """
        limits = LLParserLimits(
            verbose_errors=False,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            max_lexer_states=MAX_LEXER_STATES,
            step_lexer_fuel=LEXER_STEP_FUEL,
            step_max_items=MAX_PARSER_ITEMS,
        )
        tokenizer = self.prepare()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar does not compile: {reason(matcher)}")
        return CompiledGrammar(matcher, frozenset(tokenizer.eos_tokens))

    def _load(self) -> LLTokenizer:
        if not self.tokenizer_file.is_file():
            raise _unusable("the model's folder has no tokenizer.json")
        try:
            return LLTokenizer(
                str(self.tokenizer_file),
                n_vocab=self.vocab_size,
                eos_token=list(self.end_ids) or None,
                slices=list(SLICES),
            )
        except ValueError as error:
            raise _unusable(f"the model's tokenizer.json cannot be used ({error})") from error


def _unusable(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"constrained output is not available: {why}")
