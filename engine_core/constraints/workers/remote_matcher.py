"""Matchers on a worker, used like those of this process."""

from array import array

from tandem.engine_core.constraints.local_matcher import LocalMatcher, Tables
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    ACCEPTED,
    ENDS_FORCED,
    FAILED,
    FORCES_MORE,
    MASK,
    STOPPED,
)
from tandem.engine_core.constraints.workers.link import WorkerLink


class RemoteGrammar:
    """A grammar that was compiled on a worker."""

    def __init__(self, link: WorkerLink, number: int) -> None:
        self.link = link
        self.number = number
        self._is_spent = False

    def __del__(self) -> None:
        self.link.drop(self.number)

    @property
    def is_spent(self) -> bool:
        """True if no matcher should be opened any more."""
        return self._is_spent or self.link.is_lost

    def spend(self) -> None:
        """Open no more matchers: one has failed where one of this process does not."""
        self._is_spent = True


class RemoteMatcher:
    """Follow a grammar on a worker, like a `LocalMatcher`.

    `begin_accept` and `begin_mask` add to the worker's next batch; the other methods wait for it where they must. If
    the worker is lost, refuses a mask or rejects a token, a matcher in this process follows the same tokens, and what
    it makes of them counts.
    """

    def __init__(self, grammar: RemoteGrammar, tables: Tables) -> None:
        """Open a slot.

        tables: the same grammar in this process.
        """
        self.link = grammar.link
        self.local: LocalMatcher | None = None
        """The matcher that has taken over; None before."""
        self._grammar = grammar
        self._tables = tables
        self._tokens: array[int] = array("i")
        self._slot = self.link.open(grammar.number)
        self._flags = 0
        self._forced: list[int] = []
        self._is_unread = True
        """True while flags and forced tokens are those before the last operation."""

    def __del__(self) -> None:
        if self.local is None:
            self.link.close_slot(self._slot)

    def begin_accept(self, token: int) -> None:
        """Let the worker accept a token in its next batch."""
        self._tokens.append(token)
        self.link.pending.extend((ACCEPT, self._slot, token))
        self._is_unread = True

    def end_accept(self) -> tuple[bool, list[int] | None]:
        """Return whether the token was accepted, and the tokens that are forced next.

        None if the grammar does not go on, or if that is not known.
        """
        self._read()
        if self.local is not None:
            return self.local.accepted, None
        goes_on = self._flags & (ACCEPTED | STOPPED) == ACCEPTED
        return bool(self._flags & ACCEPTED), self.compute_ff_tokens() if goes_on else None

    def begin_mask(self, place: int) -> None:
        """Let the worker write the mask in its next batch.

        It must be waited for before `end_mask`.
        """
        self.link.pending.extend((MASK, self._slot, place))

    def end_mask(self) -> bool:
        """Return whether the mask was written; if not, `local` has taken over."""
        if self.local is None and (self.link.is_lost or not self.link.channel.has_mask(self._slot)):
            self._take_over()
        return self.local is None

    def consume_token(self, token: int) -> bool:
        """Accept a token.

        A forced one is known to be accepted, and left to the next batch.
        """
        self._read()
        if self.local is not None:
            return self.local.consume_token(token)
        if self._forced[:1] != [token]:
            self.begin_accept(token)
            return self.end_accept()[0]
        self._tokens.append(token)
        self.link.pending.extend((ACCEPT, self._slot, token))
        del self._forced[0]
        if not self._forced:
            if self._flags & ENDS_FORCED:
                self._flags |= STOPPED
            self._is_unread = bool(self._flags & FORCES_MORE)
        return True

    def is_stopped(self) -> bool:
        self._read()
        return bool(self._flags & STOPPED) if self.local is None else self.local.is_stopped()

    def get_error(self) -> str:
        self._read()
        return "" if self.local is None else self.local.get_error()

    def compute_ff_tokens(self) -> list[int]:
        self._read()
        return list(self._forced) if self.local is None else self.local.compute_ff_tokens()

    def _read(self) -> None:
        """Read what is known of the matcher after its last operation."""
        if not self._is_unread or self.local is not None:
            return
        self.link.settle()
        if self.link.is_lost or self.link.channel.flags(self._slot) & FAILED:
            self._take_over()
            return
        channel = self.link.channel
        self._flags, self._forced = channel.flags(self._slot), channel.forced(self._slot)
        self._is_unread = False

    def _take_over(self) -> None:
        """Go on in this process, after the same tokens."""
        self.local = LocalMatcher(self._tables, self._tokens)
        if not self.local.get_error():
            self._grammar.spend()
        self.link.close_slot(self._slot)
