"""Limits of API keys, over all frontends of an engine."""

import math
from collections.abc import Callable

from tandem.engine_core.sequence import Sequence
from tandem.protocol.commands import KeyClaim
from tandem.protocol.events import KeyUsage

SETTLE_SECONDS = 0.25
"""Time between two looks at what the sequences of all keys have generated."""
_MINUTE = 60.0


class KeyAccount:
    """Open sequences of one key, and its bucket of tokens.

    The bucket holds at most the tokens of a minute and refills evenly. Outputs are taken from it as they are generated,
    so that it may fall below zero; then the key waits longer.
    """

    __slots__ = ("level", "max_concurrent", "open", "settled_at", "tokens_per_minute")

    def __init__(self, now: float) -> None:
        self.max_concurrent = self.tokens_per_minute = 0
        self.level = 0.0
        """Tokens left, as of `settled_at`."""
        self.settled_at = now
        self.open: dict[Sequence, int] = {}
        """Open sequences, and the generated tokens of each that were taken from the bucket."""

    def set_limits(self, claim: KeyClaim) -> None:
        """Take over the limits of the newest claim.

        What was used before stays used.
        """
        self.max_concurrent = claim.max_concurrent
        if claim.tokens_per_minute != self.tokens_per_minute:
            self.level += claim.tokens_per_minute - self.tokens_per_minute
            self.tokens_per_minute = claim.tokens_per_minute

    def settle(self, now: float) -> None:
        """Forget sequences that have ended, and bring the bucket up to date.

        A prompt that no step has computed is given back.
        """
        spent = 0
        for seq, counted in list(self.open.items()):
            spent += seq.generated - counted
            if seq.outcome is None:
                self.open[seq] = seq.generated
            else:
                del self.open[seq]
                spent -= charge(seq) if seq.wire.reported_cached < 0 else 0
        gained = (now - self.settled_at) * self.tokens_per_minute / _MINUTE
        self.level = min(self.tokens_per_minute, self.level - spent + gained)
        self.settled_at = now

    @property
    def is_idle(self) -> bool:
        """True if nothing is known that a new account would not know."""
        return not self.open and self.level >= self.tokens_per_minute

    def seconds_until(self, tokens: int) -> int:
        """Return the whole seconds until the bucket holds this many tokens."""
        missing = min(tokens, self.tokens_per_minute) - self.level
        return max(math.ceil(missing * _MINUTE / self.tokens_per_minute), 1)

    def usage(self, name: str) -> KeyUsage:
        """Return what is left of the limits, as frontends tell it to clients."""
        limit, rate = self.tokens_per_minute, self.tokens_per_minute / _MINUTE
        return KeyUsage(
            name,
            self.max_concurrent,
            max(self.max_concurrent - len(self.open), 0),
            limit,
            max(int(self.level), 0),
            (limit - self.level) / rate if rate else 0.0,
        )


class KeyLimits:
    """Accounts of the keys that have limits, by their names.

    A key that was idle for as long as its bucket takes to fill is forgotten.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.accounts: dict[str, KeyAccount] = {}
        self.news: KeyUsage | None = None
        """Usage of the key of the last request, until it was taken for the frontend."""
        self._clock = clock
        self._settle_at = 0.0

    def refusal(self, claim: KeyClaim, is_first: bool) -> tuple[str, int] | None:
        """Return why a sequence exceeds a limit of its key.

        With it come the seconds after which it would not, 0 if they are unknown. None if it may be accepted. The
        first sequence of a group stands for all
        of it: those that follow were counted with it, and are refused only if other frontends were faster.
        """
        account, size = self._account(claim), claim.num_sequences if is_first else 1
        # Bringing an account up to date looks at each of its sequences: `advance` does it often enough for a request
        # that fits anyway.
        is_full = 0 < account.max_concurrent < len(account.open) + size
        if is_full or (is_first and account.tokens_per_minute > 0 and account.level < claim.prompt_tokens):
            account.settle(self._clock())
            self.news = account.usage(claim.name)
        num_open = len(account.open)
        if account.max_concurrent and num_open + size > account.max_concurrent:
            return (
                f"the API key {claim.name!r} has {num_open} sequences in progress and this request asks for {size} "
                f"more; its limit is {account.max_concurrent} (max_concurrent); try again later"
            ), 0
        limit, wanted = account.tokens_per_minute, claim.prompt_tokens
        if limit and is_first and account.level < min(wanted, limit):
            seconds = account.seconds_until(wanted)
            return (
                f"the API key {claim.name!r} has {max(int(account.level), 0)} of its {limit} tokens a minute left "
                f"(tokens_per_minute), the prompt has {wanted}; try again in {seconds} s"
            ), seconds
        return None

    def begin(self, claim: KeyClaim, seq: Sequence) -> None:
        """Count an accepted sequence.

        The prompt of a request that has lost its engine was counted before.
        """
        account = self._account(claim)
        account.open[seq] = 0
        account.level -= charge(seq)
        self.news = account.usage(claim.name)

    def take_news(self) -> KeyUsage | None:
        """Return the usage that a frontend has to learn, if there is one."""
        news, self.news = self.news, None
        return news

    def advance(self, now: float) -> None:
        """Bring all accounts up to date, if that is due."""
        if now < self._settle_at:
            return
        self._settle_at = now + SETTLE_SECONDS
        for name, account in list(self.accounts.items()):
            account.settle(now)
            if account.is_idle:
                del self.accounts[name]

    def _account(self, claim: KeyClaim) -> KeyAccount:
        """Return the account of a claim, with the limits of the claim."""
        account = self.accounts.get(claim.name)
        if account is None:
            account = self.accounts[claim.name] = KeyAccount(self._clock())
        account.set_limits(claim)
        return account


def charge(seq: Sequence) -> int:
    """Return the prompt tokens that a sequence takes from its key's bucket.

    Each prompt counts once, however many choices it has, and however many engines were lost with it.
    """
    submit = seq.submit
    return seq.prompt_len if submit.sampling.choice == 0 and not submit.lost_engines else 0
