"""Matchers on a worker, with the interface of `LocalMatcher`."""

from array import array
from collections.abc import Sequence
from typing import Protocol
from weakref import ReferenceType

from tandem.engine_core.constraints.local_matcher import LocalMatcher, Tables
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    ACCEPTED,
    ENDS_FORCED,
    FAILED,
    FORCES_MORE,
    SLOT_BITS,
    STOPPED,
    TAKE,
)
from tandem.engine_core.constraints.workers.link import WorkerLink


class RemoteGrammar:
    """Grammar compiled on a worker."""

    def __init__(self, link: WorkerLink, number: int) -> None:
        self.link = link
        self.number = number
        self._is_spent = False

    def __del__(self) -> None:
        self.link.drop(self.number)

    @property
    def is_spent(self) -> bool:
        """Return True if no more matchers should be opened."""
        return self._is_spent or self.link.is_lost

    def spend(self) -> None:
        """Open no more matchers, after one failed on the worker but not in this process."""
        self._is_spent = True


class Owner(Protocol):
    """Owner of a matcher that may be on a worker."""

    def take_back(self, local: LocalMatcher) -> None:
        """Use a matcher in this process from now on."""


class RemoteMatcher:
    """Advance a grammar on a worker, like a `LocalMatcher`.

    `WorkerPool.enqueue` advances many matchers at once; the methods here block if needed. If the worker is lost,
    refuses a mask or rejects a token, a matcher in this process replays the tokens and takes over.
    """

    def __init__(self, grammar: RemoteGrammar, tables: Tables) -> None:
        """Open a slot on the worker.

        tables: the same grammar, compiled in this process.
        """
        self.link = grammar.link
        self.local: LocalMatcher | None = None
        """Matcher that has taken over; None while the worker is used."""
        self.owner: ReferenceType[Owner] | None = None
        """Called when `local` takes over."""
        self.tokens: array[int] = array("i")
        """Tokens sent to the worker."""
        self._grammar = grammar
        self._tables = tables
        self._slot = self.link.open(grammar.number)
        self._forced, ends = list(tables.start[0]), tables.start[1]
        """Next forced tokens, while the worker has not received all tokens before them."""
        self._flags = ENDS_FORCED if ends else 0
        self._known_at = self.link.num_posts
        """`WorkerLink.num_posts` up to which the two attributes above are valid; afterwards the worker's state is."""

    def __del__(self) -> None:
        if self.local is None:
            self.link.close_slot(self._slot)

    @property
    def id(self) -> int:
        """Return `worker << SLOT_BITS | slot`, for `WorkerPool.enqueue`."""
        return self.link.number << SLOT_BITS | self._slot

    def end_accept(self) -> tuple[bool, list[int] | None]:
        """Return whether the last token was accepted, and the next forced tokens.

        The forced tokens are None if the grammar has ended, or if they are unknown. Call after `wait_accepted`.
        """
        self._check()
        if self.local is not None:
            return self.local.accepted, None
        flags = self.link.channel.flags[self._slot]
        goes_on = flags & (ACCEPTED | STOPPED) == ACCEPTED
        return bool(flags & ACCEPTED), self.link.channel.forced(self._slot) if goes_on else None

    def end_mask(self) -> bool:
        """Return True if the mask was written; otherwise `local` has taken over."""
        if self.local is None and (self.link.is_lost or not self.link.channel.has_mask[self._slot]):
            self._take_over()
        return self.local is None

    def consume_token(self, token: int) -> bool:
        """Accept a token.

        A forced token needs no answer; it is sent with the next batch.
        """
        self._read()
        if self.local is not None:
            return self.local.consume_token(token)
        if self._forced[:1] == [token] and (len(self._forced) > 1 or not self._flags & FORCES_MORE):
            return self.consume_tokens([token])
        self.tokens.append(token)
        self.link.pending.extend((ACCEPT, self._slot, token))
        self._known_at = -1
        self.link.post_and_wait()
        return self.end_accept()[0]

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Accept forced tokens, like `consume_token`."""
        self._read()
        if self.local is not None:
            return self.local.consume_tokens(tokens)
        count = len(tokens)
        assert self._forced[:count] == list(tokens), f"{tokens} where {self._forced} are forced"
        if count == len(self._forced) and self._flags & FORCES_MORE:
            return all(self.consume_token(token) for token in tokens)
        self.tokens.extend(tokens)
        for index, token in enumerate(tokens, start=1):
            # Only the state after the last token is needed.
            self.link.pending.extend((ACCEPT if index == count else TAKE, self._slot, token))
        del self._forced[:count]
        return True

    def is_stopped(self) -> bool:
        self._read()
        if self.local is not None:
            return self.local.is_stopped()
        return bool(self._flags & STOPPED or (not self._forced and self._flags & ENDS_FORCED))

    def get_error(self) -> str:
        self._read()
        return "" if self.local is None else self.local.get_error()

    def compute_ff_tokens(self) -> list[int]:
        self._read()
        return list(self._forced) if self.local is None else self.local.compute_ff_tokens()

    def _read(self) -> None:
        """Read the next forced tokens from the worker, if it has received all tokens."""
        link = self.link
        if self.local is not None or self._known_at == link.num_posts:
            return
        if link.is_awaited:
            link.post()
        link.wait_accepted()
        self._check()
        if self.local is None:
            self._forced, self._flags = link.channel.forced(self._slot), link.channel.flags[self._slot]
            self._known_at = link.num_posts

    def _check(self) -> None:
        """Take over in this process if the worker is lost or its matcher has failed."""
        if self.local is None and (self.link.is_lost or self.link.channel.flags[self._slot] & FAILED):
            self._take_over()

    def _take_over(self) -> None:
        """Replay the tokens in this process and continue there."""
        self.local = LocalMatcher(self._tables, self.tokens)
        if not self.local.get_error():
            self._grammar.spend()
        self.link.close_slot(self._slot)
        self.link.num_given_back += 1
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            owner.take_back(self.local)
