"""Running sequences, waiting sequences in the order of admission, and prompts without output."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator

from tandem.engine_core.errors import RequestError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.scheduler.logprobs import max_logprobs
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode

JUMP_SHARE = 4
"""A step of steady decode may become one with a row of several positions if that saves a sample for every four rows:
such a step takes a tenth to a third longer on a device, and more of the host's time."""


class RunningSequences:
    """Sequences with a row, and those that need more than one position."""

    def __init__(self) -> None:
        self.members: dict[int, Sequence] = {}
        """Running sequences by id, in the order of admission."""
        self.unsteady: set[int] = set()
        """Ids of the members outside steady decode."""
        self.constrained: set[int] = set()
        """Ids of the members with a grammar."""
        self.adapted: set[int] = set()
        """Ids of the members with an adapter."""
        self._any_skipped = False
        """True if a member may have been left out of the last steps."""
        self._logprobs: dict[int, int] = {}
        """Largest number of alternatives that each member wants, by id, for members that want log-probabilities."""

    @property
    def logprobs(self) -> int:
        """Largest number of alternatives that any member wants.

        -1 if no member wants log-probabilities (see `StepPlan`).
        """
        return max(self._logprobs.values()) if self._logprobs else -1

    @property
    def min_jump(self) -> int:
        """Minimum number of samples that forced tokens must save to be worth a step of another kind.

        One is enough where the next step has a row of several positions anyway.
        """
        return 1 if self.unsteady else max(1, ceil_div(len(self.members), JUMP_SHARE))

    def add(self, seq: Sequence) -> None:
        """Add a sequence that was just admitted."""
        self.members[seq.id] = seq
        self.unsteady.add(seq.id)
        if seq.constraint is not None:
            self.constrained.add(seq.id)
        if seq.adapter is not None:
            self.adapted.add(seq.id)
        wanted = max_logprobs(seq)
        if wanted >= 0:
            self._logprobs[seq.id] = wanted

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; do nothing if it is not running."""
        self.members.pop(seq.id, None)
        self.unsteady.discard(seq.id)
        self.constrained.discard(seq.id)
        self.adapted.discard(seq.id)
        self._logprobs.pop(seq.id, None)

    def count_skipped(self, rows: Collection[ScheduledSequence]) -> None:
        """Count a step for each member that has no row in it.

        rows: of the launched step.
        """
        if self._any_skipped or len(rows) < len(self.members):
            served = {row.seq_id for row in rows}
            for seq in self.members.values():
                seq.steps_skipped = 0 if seq.id in served else seq.steps_skipped + 1
            self._any_skipped = len(served) < len(self.members)


ARRIVALS_PER_PRIORITY = 64
"""Number of arrivals that one step of priority is worth. For each step by which their priority is above its own,
at most this many later arrivals overtake a waiting sequence, so no sequence waits indefinitely."""


class WaitingQueue:
    """Waiting sequences, ordered by arrival or by seniority.

    Preempted sequences are always ordered by seniority. So a sequence that was preempted for one of higher priority
    does not return to the head, where it would block the others and be preempted again.
    """

    def __init__(self, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._order: list[tuple[int, int]] = []
        self._members: dict[int, Sequence] = {}
        self._by_queued_at: list[tuple[float, int]] = []
        """Time at which each member was queued, with its id, earliest first."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order; sequences that were yielded may be removed meanwhile."""
        for _, seq_id in tuple(self._order):
            yield self._members[seq_id]

    @property
    def longest_waiting(self) -> Sequence | None:
        """Sequence that has waited for the longest time, whatever the order."""
        return self._members[self._by_queued_at[0][1]] if self._by_queued_at else None

    def push(self, seq: Sequence) -> None:
        """Insert a sequence in order."""
        self._members[seq.id] = seq
        insort(self._order, self._key(seq))
        insort(self._by_queued_at, (seq.queued_at, seq.id))

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence.

        Raises KeyError if it is not waiting.
        """
        del self._members[seq.id]
        del self._order[bisect_left(self._order, self._key(seq))]
        del self._by_queued_at[bisect_left(self._by_queued_at, (seq.queued_at, seq.id))]

    def reorder(self, by_priority: bool) -> None:
        """Order the queue by seniority, or by arrival."""
        self._by_priority = by_priority
        self._order = sorted([self._key(seq) for seq in self._members.values()])

    def _key(self, seq: Sequence) -> tuple[int, int]:
        return seniority(seq) if self._by_priority or seq.preemptions else (seq.id, seq.id)


def seniority(seq: Sequence) -> tuple[int, int]:
    """Return the sort key of seniority; the least is the most senior.

    It orders by arrival with a head start for priority.
    """
    return (seq.id - ARRIVALS_PER_PRIORITY * seq.priority, seq.id)


def queue_full(waiting: int, free_rows: int, max_waiting: int) -> RequestError:
    """Return the error of a request that the queue cannot take."""
    return RequestError(
        ErrorCode.OVERLOADED,
        f"{waiting} requests are waiting already; with {free_rows} free rows --max-waiting allows {max_waiting}; retry "
        "later",
    )


class QueuedPrompts:
    """Count of the prompt tokens of all open sequences without output.

    The choices of a request share their prompt, which counts with the first of them.

    A prompt leaves with the commit of the step that samples its first token, or with the end of its sequence. Every
    method takes constant time, counted over all calls.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._lengths: dict[int, int] = {}
        """Length of each prompt that counts, by sequence."""
        self._sampled: deque[tuple[int, int]] = deque()
        """Launched steps that sample a first token, and its sequence, in the order of launches."""

    def add(self, seq: Sequence) -> None:
        """Count the prompt of an accepted sequence."""
        self._lengths[seq.id] = counted = seq.prompt_len if seq.submit.sampling.choice == 0 else 0
        self.num_tokens += counted

    def on_sample(self, seq_id: int, step_id: int) -> None:
        """Note that a launched step samples a token of a sequence."""
        if seq_id in self._lengths:
            self._sampled.append((step_id, seq_id))

    def on_commit(self, step_id: int) -> list[int]:
        """Remove the prompts that got their first token in the committed step.

        Return their sequences, without those that have ended.
        """
        sampled, removed = self._sampled, []
        while sampled and sampled[0][0] <= step_id:
            seq_id = sampled.popleft()[1]
            if seq_id in self._lengths:
                self.remove(seq_id)
                removed.append(seq_id)
        return removed

    def remove(self, seq_id: int) -> None:
        """Remove the prompt of a sequence that has output or has ended. Idempotent."""
        self.num_tokens -= self._lengths.pop(seq_id, 0)
