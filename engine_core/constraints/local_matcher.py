"""A matcher in this process."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from llguidance import LLMatcher

LEAST_TOKENS = 64
"""Tokens for which new tables must have lasted to be replaced by newer ones."""
MOST_RENEWALS = 2
"""Times that the tables are replaced for one token. Other tables may reach their limit meanwhile."""
REFUEL_TOKENS = 64
"""Tokens that are followed from one mask to the next. A lexer has fuel for one step (LEXER_STEP_FUEL), which only masks
renew: 1,300 tokens of a long string use it up."""
_FULL, _OUT_OF_FUEL = "too many states", "too many expressions"
"""Message of llguidance for a lexer that has reached its maximum of states, or has run out of fuel. Both fail for
all that share it."""


class Tables(Protocol):
    """A compiled grammar; its matchers share the tables of its lexer."""

    first: LLMatcher
    """Its matcher at the start."""

    @property
    def start(self) -> tuple[list[int], bool]:
        """Tokens that are forced at the start, and whether only an end may follow."""

    def renew(self, full: LLMatcher) -> bool:
        """Replace the tables of a matcher at the start.

        Return whether `first` has other ones now.
        """

    def spoil(self, failed: LLMatcher) -> None:
        """Have nothing begin with the tables of a matcher at the start any more."""


class LocalMatcher:
    """Follow a grammar in this process.

    The matcher begins again with new tables where the grammar's are full. A lexer may have a limited number of states
    (MAX_LEXER_STATES), which all sequences that follow a grammar fill together: those of a string with a limit of
    20,000 characters need more than it may have, but not at a time.
    """

    def __init__(self, tables: Tables, tokens: Iterable[int] = ()) -> None:
        """Begin after some tokens."""
        self.tables = tables
        """The grammar that it follows."""
        self._tokens = array("i", tokens)
        self._began = 0
        """Number of tokens when the tables were new."""
        self._first = tables.first
        self._matcher = self._first.deep_copy()
        self.accepted = True
        """Whether the last token was accepted."""
        self._forced: list[int] = []
        """Tokens that are forced after the last one, as far as `follow` has computed them."""
        self._follow()
        if not self.accepted:
            self._begin_again()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it was given."""
        return len(self._tokens)

    def consume_token(self, token: int) -> bool:
        """Accept a token.

        Return False if the grammar rejects it or cannot be followed any further.
        """
        self._tokens.append(token)
        self._forced = []
        self.accepted = self._matcher.consume_token(token)
        if not self.accepted:
            self._begin_again()
        return self.accepted

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Accept tokens that are forced, like `consume_token`."""
        self._tokens.extend(tokens)
        self._forced = []
        self.accepted = self._matcher.consume_tokens(list(tokens))
        if not self.accepted:
            self._begin_again()
        return self.accepted

    def follow(self, token: int) -> list[int] | None:
        """Accept a token, and return the tokens that are forced next.

        None if it was not `accepted`, or if the grammar does not go on.
        """
        known = self._forced
        accepted = self.consume_token(token)
        if accepted and len(known) > 1 and known[0] == token:
            self._forced = known[1:]  # Computing it takes longer than the rest.
            return self._forced
        matcher = self._matcher
        if not accepted or matcher.is_stopped():
            return None
        self._forced = matcher.compute_ff_tokens()
        return self._forced

    def write_mask(self, address: int, size: int) -> None:
        """Write the mask of the next token, of `size` bytes."""
        self._matcher.unsafe_compute_mask_ptr(address, size)
        if self._matcher.is_error() and self._begin_again():
            self._matcher.unsafe_compute_mask_ptr(address, size)

    def is_stopped(self) -> bool:
        return self._matcher.is_stopped()

    def get_error(self) -> str:
        return self._matcher.get_error()

    def compute_ff_tokens(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def _begin_again(self) -> bool:
        """Replay the tokens with new tables if the tables are full; return whether that was of use."""
        is_young = self._began and len(self._tokens) - self._began < LEAST_TOKENS
        for _ in range(MOST_RENEWALS):
            problem = self._problem()
            if _OUT_OF_FUEL in problem:
                self.tables.spoil(self._first)
            if is_young or _FULL not in problem or not self.tables.renew(self._first):
                return False
            self._began, self._first = len(self._tokens), self.tables.first
            self._matcher = self._first.deep_copy()
            self._follow()
            if self.accepted:
                return True
        return False

    def _problem(self) -> str:
        """Return why the matcher has failed.

        If the tables reach a limit within a token, llguidance only reports that the token does not satisfy the grammar;
        the next use of these tables reports the limit.
        """
        error = self._matcher.get_error()
        if _FULL in error or _OUT_OF_FUEL in error or not self._tokens:
            return error
        probe = self._first.deep_copy()
        return error if probe.consume_token(self._tokens[0]) else probe.get_error()

    def _follow(self) -> None:
        """Accept all tokens from the first on."""
        matcher, self.accepted = self._matcher, True
        for index, token in enumerate(self._tokens):
            if index % REFUEL_TOKENS == 0:
                matcher.compute_bitmask()
            self.accepted = matcher.consume_token(token)
            if not self.accepted:
                return
