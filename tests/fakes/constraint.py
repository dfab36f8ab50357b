"""Grammars of a few words, each a rule about ids, and fakes that compile them and fill their masks."""

from collections.abc import Callable, Sequence, Set
from copy import copy

import numpy as np
from numpy.typing import NDArray

from tandem.engine_core.contracts import NO_TOKEN, ArrivingTokens, Constraint, MaskedRows
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tests.fakes.model import END, VOCAB


class FakeConstraint:
    """Constraint by one of these rules; it never allows 0, which sampling yields where nothing is allowed.


    - parity: even and odd ids take turns, the end is allowed on even turns
    - runs N: begins with N forced ids; some of the others are followed by a forced run, which may end with the end id
    - stops N: any id but the end, and complete after N
    - dies N: any id, and after N nothing is allowed
    - thinks N: any id but the end up to the first N, and from the one after it on as with parity
    - breaks N: anything is allowed, but the token after N is rejected
    """

    def __init__(self, grammar: str) -> None:
        self.rule, _, number = grammar.partition(" ")
        self.limit = int(number or 0)
        self.taken = 0
        self.is_thinking = self.rule == "thinks"
        self.queue = [2 + step * 7 % (VOCAB - 2) for step in range(self.limit)] if self.rule == "runs" else []
        """Ids that are forced next."""
        self.problem_text = ""

    @property
    def is_complete(self) -> bool:
        return self.rule == "stops" and self.taken >= self.limit

    @property
    def problem(self) -> str:
        return self.problem_text

    def is_end(self, token: int) -> bool:
        return token == END

    def fast_forward_tokens(self) -> list[int]:
        return list(self.queue)

    def allows(self, token: int) -> bool:
        if token == 0:
            return False
        match self.rule:
            case "thinks" if self.is_thinking:
                return token != END
            case "parity" | "thinks" if self.taken % 2:
                return token % 2 == 1 and token != END
            case "parity" | "thinks":
                return token == END or token % 2 == 0
            case "runs" if self.queue:
                return token == self.queue[0]
            case "stops":
                return token != END and not self.is_complete
            case "dies":
                return self.taken < self.limit
        return True

    def accept(self, token: int) -> bool:
        broken = self.rule == "breaks" and self.taken >= self.limit
        if self.problem_text or broken or not self.allows(token):
            self.problem_text = f"{token} cannot follow {self.taken} tokens"
            return False
        self.taken += 1
        if self.is_thinking and token == self.limit:
            self.is_thinking, self.taken = False, 0
        if self.queue:
            self.queue.pop(0)
        elif self.rule == "runs" and token % 3 == 0:
            self.queue = [2 + (token * step) % (VOCAB - 2) for step in range(1, 2 + token % 4)]
            self.queue += [END] * (token % 7 == 0)
        return True

    def accept_forced(self, tokens: Sequence[int]) -> bool:
        assert self.fast_forward_tokens()[: len(tokens)] == list(tokens), f"{tokens} are not forced"
        return all(self.accept(token) for token in tokens)


class FakeFiller:
    """Fills masks of real width; ids outside the fakes' vocabulary are never allowed."""

    def allocate(self, rows: int, words: int) -> NDArray[np.int32] | None:
        return None

    def prefetch(self, masks: Sequence[tuple[Constraint, int]], out: NDArray[np.int32]) -> None:
        return None

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: NDArray[np.int32]) -> None:
        for constraint, index in masks:
            bits = sum(1 << token for token in range(1, VOCAB) if own(constraint).allows(token))
            out[index] = np.frombuffer(bits.to_bytes(out.shape[1] * 4, "little"), dtype=np.int32)


class FakeCompiler:
    """Fake of `contracts.Compiler`: each grammar takes `delay()` polls; one called "bad" does not compile."""

    def __init__(self, delay: Callable[[], int] = lambda: 0) -> None:
        self.delay = delay
        self.jobs: dict[int, tuple[str, int]] = {}
        """Grammar of each waiting sequence, and the number of polls until it is ready."""
        self.seconds: list[float] = []
        """CPU time that frontends measured for each grammar."""
        self.closed = False

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs)

    def start(self, seq_id: int, grammar: str, ignore_ends: bool, key: str = "", seconds: float = 0.0) -> None:
        assert not self.closed and seq_id not in self.jobs
        self.jobs[seq_id] = (grammar, self.delay())
        self.seconds.append(seconds)

    def cancel(self, seq_id: int) -> None:
        self.jobs.pop(seq_id, None)

    def take_finished(self) -> list[tuple[int, Constraint | RequestError]]:
        ready = [(seq_id, _compiled(grammar)) for seq_id, (grammar, polls) in self.jobs.items() if polls == 0]
        self.jobs = {seq_id: (grammar, polls - 1) for seq_id, (grammar, polls) in self.jobs.items() if polls}
        return ready

    def close(self) -> None:
        self.closed = True


class FakeAdvancer:
    """Fake of `contracts.GrammarAdvancer`: advances those of the sequences that it may and that `advances()`
    chooses."""

    def __init__(self, advances: Callable[[], bool] = lambda: True, is_remote: bool = False) -> None:
        self.advances = advances
        self.is_remote = is_remote
        """Return value of `accept_on_arrival`: whether other processes accept the tokens."""
        self.started: list[tuple[int, Constraint, int]] | None = None
        self.least = 1
        self.num_advanced = 0
        self.arriving: tuple[MaskedRows, ArrivingTokens] | None = None
        """Rows passed to `accept_on_arrival`, and where their tokens arrive."""

    def accept_on_arrival(self, masks: MaskedRows, arriving: ArrivingTokens) -> bool:
        assert self.started is None and self.arriving is None and masks, "arriving twice, or nothing"
        if self.is_remote:
            self.arriving = masks, arriving
        return self.is_remote

    def start_accept(self, masks: MaskedRows, tokens: Sequence[int], least: int) -> None:
        assert self.started is None and least >= 1, "started twice"
        if self.arriving is not None:
            arrived = [self.arriving[1].memory[index] for index in self.arriving[1].indices]
            assert self.arriving[0] is masks and arrived == list(tokens), f"{arrived} instead of {tokens}"
        self.least, self.arriving = least, None
        started = [(row, constraint, token) for (row, constraint), token in zip(masks, tokens, strict=True)]
        self.started = [each for each in started if each[2] != NO_TOKEN]

    def finish_accept(self) -> Set[int]:
        assert self.started is not None, "finished before start_accept"
        started, self.started, advanced = self.started, None, set()
        for row, constraint, token in started:
            ahead = copy(own(constraint))
            ahead.queue = list(ahead.queue)
            goes_on = ahead.accept(token) and not ahead.is_complete and len(ahead.fast_forward_tokens()) < self.least
            if goes_on and self.advances():
                constraint.accept(token)
                advanced.add(row)
        self.num_advanced += len(advanced)
        return advanced


def own(constraint: Constraint) -> FakeConstraint:
    assert isinstance(constraint, FakeConstraint), constraint
    return constraint


def _compiled(grammar: str) -> Constraint | RequestError:
    if grammar == "bad":
        return RequestError(ErrorCode.INVALID_GRAMMAR, "it is bad")
    return FakeConstraint(grammar)
