"""Matcher in this process, with lexer tables that are renewed when they are full."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from llguidance import LLMatcher

MIN_RENEWAL_TOKENS = 64
"""Minimum number of tokens between two renewals of the tables."""
MAX_RENEWALS = 2
"""Maximum number of renewals per token; other tables may reach their limit meanwhile."""
REFUEL_TOKENS = 64
"""Maximum number of tokens between two masks. A lexer has fuel for one step (LEXER_STEP_FUEL), which only masks renew:
1,300 tokens of a long string exhaust it."""
_FULL, _OUT_OF_FUEL = "too many states", "too many expressions"
"""Messages of llguidance for a lexer that has too many states, or no fuel, and fails for all matchers that share it."""


class Tables(Protocol):
    """Compiled grammar; its matchers share the tables of its lexer."""

    first: LLMatcher
    """Initial matcher."""

    @property
    def start(self) -> tuple[list[int], bool]:
        """Return the tokens forced at the start, and whether only an end id may follow."""

    def renew(self, full: LLMatcher) -> bool:
        """Replace the tables of `full`, an initial matcher.

        Return True if `first` has other tables now.
        """

    def discard(self, failed: LLMatcher) -> None:
        """Stop using the tables of `failed`, an initial matcher, for new matchers."""


class LocalMatcher:
    """Advance a grammar in this process.

    Replays its tokens with new tables when the grammar's tables are full. The number of lexer states is limited
    (MAX_LEXER_STATES) and shared by all sequences of a grammar: a string of up to 20,000 characters needs more states
    than the limit, but not at the same time.
    """

    def __init__(self, tables: Tables, tokens: Iterable[int] = ()) -> None:
        """Start after some tokens."""
        self.tables = tables
        """Grammar."""
        self._tokens = array("i", tokens)
        self._renewed_at = 0
        """Number of tokens at the last renewal of the tables."""
        self._first = tables.first
        self._matcher = self._first.deep_copy()
        self.accepted = True
        """True if the last token was accepted."""
        self._forced: list[int] = []
        """Forced tokens after the last one, if `follow` has computed them."""
        self._follow()
        if not self.accepted:
            self._renew_and_replay()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self._tokens)

    def consume_token(self, token: int) -> bool:
        """Accept a token.

        Return False if the grammar rejects it or cannot be followed any further.
        """
        self._tokens.append(token)
        self._forced = []
        self.accepted = self._matcher.consume_token(token)
        if not self.accepted:
            self._renew_and_replay()
        return self.accepted

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Accept forced tokens, like `consume_token`."""
        self._tokens.extend(tokens)
        self._forced = []
        self.accepted = self._matcher.consume_tokens(list(tokens))
        if not self.accepted:
            self._renew_and_replay()
        return self.accepted

    def follow(self, token: int) -> list[int] | None:
        """Accept a token and return the next forced tokens.

        Returns None if it was not `accepted`, or if the grammar has ended.
        """
        known = self._forced
        accepted = self.consume_token(token)
        if accepted and len(known) > 1 and known[0] == token:
            self._forced = known[1:]  # Computing them takes longer than everything else.
            return self._forced
        matcher = self._matcher
        if not accepted or matcher.is_stopped():
            return None
        self._forced = matcher.compute_ff_tokens()
        return self._forced

    def write_mask(self, address: int, size: int) -> None:
        """Write the mask of the next token to `address`, `size` bytes."""
        self._matcher.unsafe_compute_mask_ptr(address, size)
        if self._matcher.is_error() and self._renew_and_replay():
            self._matcher.unsafe_compute_mask_ptr(address, size)

    def is_stopped(self) -> bool:
        return self._matcher.is_stopped()

    def get_error(self) -> str:
        return self._matcher.get_error()

    def compute_ff_tokens(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def _renew_and_replay(self) -> bool:
        """Replay the tokens with new tables if the tables are full; return True if that helped."""
        is_young = self._renewed_at and len(self._tokens) - self._renewed_at < MIN_RENEWAL_TOKENS
        for _ in range(MAX_RENEWALS):
            problem = self._problem()
            if _OUT_OF_FUEL in problem:
                self.tables.discard(self._first)
            if is_young or _FULL not in problem or not self.tables.renew(self._first):
                return False
            self._renewed_at, self._first = len(self._tokens), self.tables.first
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
