"""Compiled grammars and their constraints."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import cast
from weakref import WeakSet, ref

from llguidance import LLMatcher

from tandem.engine_core.constraints.local_matcher import LocalMatcher
from tandem.engine_core.constraints.mask_budget import MaskCost
from tandem.engine_core.constraints.matchers import Matchers, reason
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar, RemoteMatcher
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode

CROWDED, WORKERS_SHARE = 24, 16
"""Constraints from which on a worker saves time, and further ones that are worth another. The loop's thread follows
fewer while the device computes a small model's step: 64 take 0.6 to 1.2 ms at 128k tokens and 2.1 GHz."""
RENEWAL_SECONDS = 0.03
"""CPU time up to which a grammar may be compiled again on the loop's thread when its tables are full."""


class GrammarConstraint:
    """Implement `contracts.Constraint` using a matcher in this process or on a worker."""

    __slots__ = (
        "__weakref__",
        "_accepted",
        "_ahead",
        "_ends",
        "_forced",
        "cost",
        "ignore_ends",
        "local",
        "overdrawn",
        "remote",
        "remote_id",
    )

    def __init__(
        self, matcher: LocalMatcher | RemoteMatcher, ends: frozenset[int], ignore_ends: bool, key: str = ""
    ) -> None:
        """Wrap one matcher.

        matcher: used by this constraint only; ends: ids that llguidance allows where the grammar may end; key: name of
        the API key that pays for the masks.
        """
        self.local: LocalMatcher | None = None
        """The matcher, if it is in this process."""
        self.remote: RemoteMatcher | None = None
        """The matcher, if it is on a worker."""
        self.remote_id = -1
        """Its `RemoteMatcher.id`; -1 if it is in this process."""
        self.ignore_ends = ignore_ends
        self._ends = ends
        self.cost = MaskCost(key)
        self._ahead: int | None = None
        """Token that the matcher got already; None if `accept` is to give it the next."""
        self._accepted = False
        self._forced: list[int] | None = None
        """Whether that token was accepted, and the tokens that are forced after the last one; None if not known."""
        self.overdrawn = ""
        """Problem of a constraint with masks that took too long; empty before."""
        if isinstance(matcher, RemoteMatcher):
            self._follow(matcher)
        else:
            self.local = matcher

    @property
    def is_new(self) -> bool:
        """True if the matcher is in this process and has no token yet."""
        return self.local is not None and not self.local.num_tokens

    def move(self, matcher: RemoteMatcher) -> None:
        """Have a worker follow the grammar from the start on."""
        assert self.is_new, "a constraint with tokens is moved"
        self._follow(matcher)

    def take_back(self, local: LocalMatcher) -> None:
        """Use a matcher of this process, which has taken over from the one on a worker."""
        self.local, self.remote, self.remote_id = local, None, -1

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def problem(self) -> str:
        return self.overdrawn or reason(self._matcher.get_error())

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def advance(self, token: int, accepted: bool, forced: list[int] | None) -> None:
        """Store the matcher's result for the token that `accept` gets next.

        forced: tokens that are forced after it; None if the grammar does not go on.
        """
        self._ahead, self._accepted, self._forced = token, accepted, forced

    def fast_forward_tokens(self) -> list[int]:
        # Kept until they are read once: the tokens of later steps may be accepted past this object.
        forced, self._forced = self._forced, None
        return self._matcher.compute_ff_tokens() if forced is None else list(forced)

    def accept(self, token: int) -> bool:
        """Implement `Constraint.accept`; a token outside the vocabulary is rejected."""
        if self.overdrawn:
            return False
        if self._ahead is None:
            self._forced, accepted = None, self._matcher.consume_token(token)
        else:
            assert self._ahead == token, f"token {token} after {self._ahead} was accepted ahead"
            self._ahead, accepted = None, self._accepted
        # A matcher that has failed still consumes end ids.
        return accepted and not (token in self._ends and self.problem)

    def accept_forced(self, tokens: Sequence[int]) -> bool:
        assert self._ahead is None, f"tokens {tokens} after {self._ahead} was accepted ahead"
        self._forced = None
        return self._matcher.consume_tokens(tokens)

    @property
    def _matcher(self) -> LocalMatcher | RemoteMatcher:
        return self.remote or cast("LocalMatcher", self.local)

    def _follow(self, matcher: RemoteMatcher) -> None:
        matcher.owner = ref(self)
        self.local, self.remote, self.remote_id = None, matcher, matcher.id


class CompiledGrammar:
    """A grammar's matcher at its start, copied for each sequence.

    A copy takes microseconds, a compilation milliseconds. A grammar of many sequences is compiled on workers too, which
    follow it for the sequences that begin from then on.
    """

    def __init__(
        self, first: LLMatcher, ends: frozenset[int], compile_again: Callable[[], LLMatcher] | None = None
    ) -> None:
        """Keep the parts.

        first: its matcher at the start; ends: ids that llguidance allows where it may end; compile_again: compiles it
        quickly; None if it takes long.
        """
        self.first = first
        self.is_spent = False
        """True once the next request has to recompile it: its tables are full and replacing them takes too long
        while sequences run, or the lexer ran out of fuel."""
        self._compile_again = compile_again
        self._remote: list[RemoteGrammar] = []
        self._was_refused = False
        """True once a worker has refused it: another would refuse it too."""
        self._ends = ends
        self._constraints: WeakSet[GrammarConstraint] = WeakSet()

    @cached_property
    def start(self) -> tuple[list[int], bool]:
        """Tokens that are forced at the start, and whether only an end may follow."""
        forced, after = self.first.compute_ff_tokens(), self.first.deep_copy()
        return forced, after.consume_tokens(forced) and after.is_stopped()

    @property
    def links(self) -> list[WorkerLink]:
        """The workers that have the grammar."""
        return [grammar.link for grammar in self._remote]

    @property
    def num_followed(self) -> int:
        """Number of open constraints."""
        return len(self._constraints)

    def wants_worker(self, num_followed: int) -> bool:
        """Return whether another worker would save time.

        It would for many constraints of this grammar, or, if no worker has it, of all grammars together.

        num_followed: number of open constraints of all grammars.
        """
        if self._was_refused or (not self._remote and num_followed < CROWDED):
            return False
        return not self._remote or len(self._constraints) >= CROWDED + WORKERS_SHARE * len(self._remote)

    def constraint(self, ignore_ends: bool, key: str = "") -> GrammarConstraint:
        """Return a constraint for one sequence, on the worker with the fewest.

        ignore_ends: allow end ids only where nothing else is allowed; key: name of the API key, "" for none.
        """
        constraint = GrammarConstraint(self._matcher(), self._ends, ignore_ends, key)
        self._constraints.add(constraint)
        return constraint

    def keep_here(self) -> None:
        """Give the grammar to no other worker: one has refused it."""
        self._was_refused = True

    def add_remote(self, grammar: RemoteGrammar) -> None:
        """Let a worker follow the grammar too.

        It gets its share of the constraints, of those in this process that have no token yet.
        """
        self._remote.append(grammar)
        share = len(self._constraints) // len(self._remote)
        for constraint in [each for each in self._constraints if each.is_new][:share]:
            if grammar.link.has_room and not constraint.cost.debt:
                constraint.move(RemoteMatcher(grammar, self))

    def renew(self, full: LLMatcher) -> bool:
        """Implement `local_matcher.Tables`."""
        if self.first is full:
            if self._compile_again is None:
                self.is_spent = True
                return False
            self.first = self._compile_again()
        return True

    def discard(self, failed: LLMatcher) -> None:
        """Implement `local_matcher.Tables`."""
        self.is_spent = self.is_spent or self.first is failed

    def _matcher(self) -> LocalMatcher | RemoteMatcher:
        self._was_refused |= any(grammar.is_spent and not grammar.link.is_lost for grammar in self._remote)
        self._remote = [grammar for grammar in self._remote if not grammar.is_spent]
        grammars = [grammar for grammar in self._remote if grammar.link.has_room]
        if not grammars:
            return LocalMatcher(self)
        return RemoteMatcher(min(grammars, key=lambda grammar: grammar.link.num_open), self)


class Grammars(Matchers):
    """Compile grammars for use by many sequences.

    Every method may run on any thread.
    """

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar and compute its first mask.

        Copies then find their tables warm.

        Raises RequestError with llguidance's reason. The limits on grammar, lexer and parser bound the time it takes.
        """
        tokenizer, start = self.prepare(), time.thread_time()
        matcher = self.matcher(grammar)
        is_quick = time.thread_time() - start <= RENEWAL_SECONDS
        if matcher.is_error():
            raise RequestError(
                ErrorCode.INVALID_GRAMMAR, f"the grammar does not compile: {reason(matcher.get_error())}"
            )
        compile_again = partial(self.matcher, grammar) if is_quick else None
        return CompiledGrammar(matcher, frozenset(tokenizer.eos_tokens), compile_again)
