"""Limits of API keys, over all frontends of an engine."""

import math
from collections.abc import Callable

from tandem.engine_core.sequence import Sequence
from tandem.protocol.commands import KeyClaim
from tandem.protocol.events import KeyUsage

UPDATE_INTERVAL = 0.25
"""Interval in seconds at which generated tokens are counted for all keys."""
_KEPT_SECONDS = 61
"""Time from the start of a second until its tokens no longer count: one minute after its end."""


class KeyAccount:
    """Open sequences of one key, and its tokens of the last minute.

    Tokens are counted in the second in which they are observed, and expire a minute after the end of that second. So no
    minute has more than the limit when a request is taken; outputs of those that were taken come on top as they are
    generated.
    """

    __slots__ = ("_ends", "_num_ended", "_seconds", "max_concurrent", "open", "tokens_per_minute", "used")

    def __init__(self) -> None:
        self.max_concurrent = self.tokens_per_minute = 0
        self.used = 0
        """Tokens of the last minute at the time of the last `roll_forward`."""
        self.open: dict[Sequence, tuple[int, int]] = {}
        """Open sequences: the second in which each was taken, and its generated tokens that were counted."""
        self._num_ended = 0
        """Number of those that have ended since the last `roll_forward`."""
        self._seconds: dict[int, int] = {}
        """Tokens by second, the oldest first."""
        self._ends: dict[int, tuple[int, int, float]] = {}
        """By second, the oldest first: sequences that ended, the second in which the first of them was taken, and the
        longest time that one took, in seconds."""

    @property
    def left(self) -> int:
        """Tokens left in the current minute; negative if outputs exceeded the limit."""
        return self.tokens_per_minute - self.used

    def set_limits(self, claim: KeyClaim) -> None:
        """Apply the limits of the newest claim.

        Usage so far is kept.
        """
        self.max_concurrent = claim.max_concurrent
        self.tokens_per_minute = claim.tokens_per_minute

    def take(self, seq: Sequence, now: float) -> None:
        """Count an accepted sequence."""
        second = int(now)
        self.open[seq] = second, 0
        self._spend(second, charge(seq))

    def note_end(self, seq: Sequence) -> None:
        """Count a sequence as ended until the next `roll_forward` forgets it."""
        self._num_ended += seq in self.open

    def roll_forward(self, now: float) -> None:
        """Forget sequences that have ended, and update the token count.

        A prompt that no step has computed is refunded.
        """
        second, spent, self._num_ended = int(now), 0, 0
        for seq, (taken_in, counted) in list(self.open.items()):
            spent += seq.generated - counted
            if seq.outcome is None:
                self.open[seq] = taken_in, seq.generated
                continue
            del self.open[seq]
            ended, first_taken, longest = self._ends.get(second, (0, taken_in, 0.0))
            self._ends[second] = ended + 1, min(first_taken, taken_in), max(longest, now - taken_in)
            if seq.wire.reported_cached < 0 and taken_in in self._seconds:
                self._spend(taken_in, -charge(seq))
        if spent:
            self._spend(second, spent)
        for past in list(self._seconds):
            if past + _KEPT_SECONDS > now:
                break
            self.used -= self._seconds.pop(past)
        for past in list(self._ends):
            if past + _KEPT_SECONDS > now:
                break
            del self._ends[past]

    @property
    def is_idle(self) -> bool:
        """True if the account is equal to a new one."""
        return not (self.open or self._seconds or self._ends)

    def time_until_ended(self, count: int, now: float) -> float | None:
        """Estimate the seconds until this many sequences have ended.

        The estimate uses the rate at which the key's sequences ended in the last minute, counted from the time at which
        the first of them was accepted. A key that was idle in between seems slower than it is, so the estimate is at
        most the longest duration of those sequences, and at most a minute. None if no sequence ended in the last
        minute.
        """
        if not self._ends:
            return None
        ended = sum(number for number, _, _ in self._ends.values())
        begin = max(min(taken for _, taken, _ in self._ends.values()), now - _KEPT_SECONDS)
        longest = max(seconds for _, _, seconds in self._ends.values())
        return min(count * (now - begin) / ended, longest, _KEPT_SECONDS - 1)

    def seconds_until(self, tokens: int, now: float) -> int:
        """Return the whole seconds until this number of tokens is left."""
        missing = min(tokens, self.tokens_per_minute) - self.left
        until = now
        for second, spent in self._seconds.items():
            if missing <= 0:
                break
            missing -= spent
            until = second + _KEPT_SECONDS
        return max(math.ceil(until - now), 1)

    def usage(self, name: str, now: float) -> KeyUsage:
        """Return the remaining limits, as frontends report them to clients."""
        limit = self.tokens_per_minute
        reset = max(self._seconds, default=int(now) - _KEPT_SECONDS) + _KEPT_SECONDS - now if limit else 0.0
        num_open = len(self.open) - self._num_ended
        num_free = max(self.max_concurrent - num_open, 0)
        until_ended = self.time_until_ended(num_open, now) if num_open and self.max_concurrent else 0.0
        return KeyUsage(name, self.max_concurrent, num_free, limit, max(self.left, 0), max(reset, 0.0), until_ended)

    def _spend(self, second: int, tokens: int) -> None:
        self._seconds[second] = self._seconds.get(second, 0) + tokens
        self.used += tokens


class KeyLimits:
    """Accounts of the keys that have limits, by their names.

    A key that was idle for a minute is forgotten.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.accounts: dict[str, KeyAccount] = {}
        self._usage_update: KeyUsage | None = None
        """Usage of the key of the last request, until `pop_usage_update` returns it."""
        self._clock = clock
        self._update_at = 0.0

    def refusal(self, claim: KeyClaim, is_first: bool) -> tuple[str, int] | None:
        """Return the reason why a sequence exceeds a limit of its key, with the seconds to wait.

        The seconds are 0 if unknown. None if the sequence may be accepted. The first sequence of a group counts for the
        whole group; the others are refused only if other frontends were faster.
        """
        account, size = self._account(claim), claim.num_sequences if is_first else 1
        # `roll_forward` visits each sequence of an account; for a request that fits anyway, `advance` calls it often
        # enough. Each sequence may have a token that is not counted yet.
        num_open, limit, wanted = len(account.open), account.tokens_per_minute, claim.prompt_tokens
        is_full = 0 < account.max_concurrent < num_open + size
        if is_full or (is_first and limit > 0 and account.left < wanted + num_open):
            account.roll_forward(now := self._clock())
            self._usage_update = account.usage(claim.name, now)
            num_open = len(account.open)
        if account.max_concurrent and num_open + size > account.max_concurrent:
            wait = account.time_until_ended(num_open + size - account.max_concurrent, self._clock())
            seconds = 0 if wait is None else max(math.ceil(wait), 1)
            return (
                f"the API key {claim.name!r} has {num_open} sequences in progress and this request asks for {size} "
                f"more; its limit is {account.max_concurrent} (max_concurrent); try again "
                + (f"in about {seconds} s" if seconds else "later")
            ), seconds
        if limit and is_first and account.left < min(wanted, limit):
            seconds = account.seconds_until(wanted, self._clock())
            return (
                f"the API key {claim.name!r} has {max(account.left, 0)} of its {limit} tokens a minute left "
                f"(tokens_per_minute), the prompt has {wanted}; try again in {seconds} s"
            ), seconds
        return None

    def begin(self, claim: KeyClaim, seq: Sequence) -> None:
        """Count an accepted sequence.

        The prompt of a request that has lost its engine was counted before.
        """
        account, now = self._account(claim), self._clock()
        account.take(seq, now)
        self._usage_update = account.usage(claim.name, now)

    def end(self, seq: Sequence) -> None:
        """Release the concurrency slot of a sequence that has ended."""
        if (key := seq.submit.key) is not None and (account := self.accounts.get(key.name)) is not None:
            account.note_end(seq)

    def pop_usage_update(self) -> KeyUsage | None:
        """Return and clear the pending usage update for the frontend, if any."""
        update, self._usage_update = self._usage_update, None
        return update

    def advance(self, now: float) -> None:
        """Roll all accounts forward, at most once per UPDATE_INTERVAL."""
        if now < self._update_at:
            return
        self._update_at = now + UPDATE_INTERVAL
        for name, account in list(self.accounts.items()):
            account.roll_forward(now)
            if account.is_idle:
                del self.accounts[name]

    def _account(self, claim: KeyClaim) -> KeyAccount:
        """Return the account of a claim, with the limits of the claim."""
        account = self.accounts.get(claim.name)
        if account is None:
            account = self.accounts[claim.name] = KeyAccount()
        account.set_limits(claim)
        return account


def charge(seq: Sequence) -> int:
    """Return the prompt tokens that a sequence is charged.

    Each prompt is charged once, regardless of its number of choices and of lost engines.
    """
    submit = seq.submit
    return seq.prompt_len if submit.sampling.choice == 0 and not submit.lost_engines else 0
