"""Which sequences run, and what the next step computes. Composes gates, policy and stopping; knows no device."""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from engine_core.contracts import Delta
from engine_core.errors import RequestError
from engine_core.plan import Admission, Row, StepPlan
from engine_core.scheduler.admission import PageGate, RowGate, admit
from engine_core.scheduler.policy import choose_rows
from engine_core.scheduler.sequence import Sequence
from engine_core.scheduler.stopping import end_of
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure, Finished


class SchedulerLimits(Struct, frozen=True):
    """What bounds a step and the queue."""

    max_step_tokens: int
    prefill_chunk: int
    max_waiting: int


class Committed(Struct):
    """What a step's results meant."""

    deltas: dict[bytes, Delta]
    """What each frontend gets."""
    tokens: int
    """How many in all."""
    zombies: int
    """Rows whose sequence had already ended."""


class Scheduler:
    """First come, first served, with continuous batching.

    Life of a sequence: `add` -> waiting -> `admit_waiting` -> running -> rows in steps (`plan_step`, `on_launch`,
    `commit`) -> an outcome -> leases closed once no step in flight holds it (I4). Whoever ends stands in `ended`
    exactly once (I8) until the engine takes it from there.
    """

    def __init__(self, rows: RowGate, pages: PageGate, limits: SchedulerLimits) -> None:
        self.rows = rows
        self.pages = pages
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self._open: dict[tuple[bytes, int], Sequence] = {}
        self._held: dict[int, Sequence] = {}
        """Every sequence whose leases are open, zombies too."""
        self._unsettled: set[int] = set()
        """Running sequences that are not plain."""

    @property
    def open(self) -> int:
        """Sequences that are still owed a terminal event."""
        return len(self._open)

    @property
    def held(self) -> Iterable[Sequence]:
        return self._held.values()

    def knows(self, client: bytes, request_id: int) -> bool:
        return (client, request_id) in self._open

    def add(self, seq: Sequence) -> None:
        """Accepts a sequence. Raises RequestError, with the numbers, if it can never fit or the queue is full."""
        needed, total = self.pages.needed(seq.total_len), self.pages.pages.total
        if needed > total:
            raise RequestError(
                ErrorCode.KV_CAPACITY,
                f"{seq.prompt_len} prompt tokens and max_tokens {seq.params.max_tokens} need {needed} KV pages of "
                f"{self.pages.page_size} tokens, the pool has {total}; lower max_tokens or raise --kv-tokens",
            )
        if len(self.waiting) >= self.limits.max_waiting + self.rows.free:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{len(self.waiting)} requests are waiting already, beside {self.rows.free} free rows "
                f"--max-waiting allows {self.limits.max_waiting}; retry later",
            )
        self._open[seq.client, seq.request_id] = seq
        self.waiting.append(seq)

    def admit_waiting(self) -> list[Sequence]:
        """Moves sequences from the head of the queue to running while every gate lets them; returns those moved."""
        moved: list[Sequence] = []
        while self.waiting and admit(self.waiting[0], (self.rows, self.pages)):
            seq = self.waiting.popleft()
            self.running[seq.id] = self._held[seq.id] = seq
            self._unsettled.add(seq.id)
            moved.append(seq)
        return moved

    def plan_step(self, step_id: int) -> StepPlan | None:
        """The next step over the running sequences, or None. Pure: counters change at launch and commit alone.

        Length caps are foreseen: samples in flight count. An end of sequence cannot be, hence zombies.
        Written out for speed, as is `commit`: both run for every row of every step.
        """
        if not self._unsettled and len(self.running) <= self.limits.max_step_tokens:
            return self._plan_steady(step_id)
        candidates = [seq for seq in self.running.values() if len(seq.tokens) + seq.unseen < seq.total_len]
        pending = [len(seq.tokens) + seq.unseen - seq.launched for seq in candidates]
        takes = choose_rows(pending, self.limits.max_step_tokens, self.limits.prefill_chunk)
        rows = tuple(
            [
                Row(seq.id, seq.row, seq.launched, take, take == wanted) if seq.plain else _row(seq, take, wanted)
                for seq, take, wanted in zip(candidates, takes, pending, strict=True)
                if take
            ]
        )
        if not rows:
            return None
        admitted = tuple([_admission(self.running[row.seq_id]) for row in rows if row.start == 0])
        return StepPlan.of(step_id, rows, admitted)

    def _plan_steady(self, step_id: int) -> StepPlan | None:
        """The same where the policy has nothing to choose: every sequence is plain, so each has one position pending,
        at `launched`, and the budget serves all."""
        rows = tuple(
            [
                Row(seq.id, seq.row, seq.launched, 1, True)
                for seq in self.running.values()
                if seq.launched + 1 < seq.total_len
            ]
        )
        return StepPlan(step_id, rows, (), len(rows), needs_mask=False, plain=True) if rows else None

    def on_launch(self, plan: StepPlan) -> None:
        """Counts a plan that is now on the device."""
        held = self._held
        if plan.plain:
            for row in plan.rows:
                seq = held[row.seq_id]
                seq.launched += 1
                seq.inflight += 1
                seq.unseen += 1
            return
        for row in plan.rows:
            seq = held[row.seq_id]
            seq.launched = row.start + row.length
            seq.inflight += 1
            if row.samples:
                seq.unseen += 1
            if not seq.plain:
                seq.on_launch(len(row.new_pages))
                if seq.plain:
                    self._unsettled.discard(seq.id)

    def commit(self, plan: StepPlan, tokens: list[int]) -> Committed:
        """Takes the results of the oldest step: appends tokens, ends sequences, buries zombies."""
        committed = Committed({}, 0, 0)
        deltas, held = committed.deltas, self._held
        delta = Delta([], [])
        client, append_id, append_token = None, delta.request_ids.append, delta.tokens.append
        for row, token in zip(plan.rows, tokens, strict=True):
            seq = held[row.seq_id]
            seq.inflight -= 1
            if row.samples:
                seq.unseen -= 1
            if seq.outcome is not None:
                committed.zombies += 1
                if seq.inflight == 0:
                    self._bury(seq)
            elif row.samples:
                known = seq.tokens
                known.append(token)
                if seq.client is not client:
                    client = seq.client
                    delta = deltas.setdefault(client, Delta([], []))
                    append_id, append_token = delta.request_ids.append, delta.tokens.append
                append_id(seq.request_id)
                append_token(token)
                if seq.constraint is not None:
                    seq.constraint.accept(token)
                if token in seq.end_ids or len(known) >= seq.total_len:
                    outcome = end_of(seq)
                    if outcome is not None:
                        self.end(seq, outcome)
        committed.tokens = sum([len(delta.tokens) for delta in deltas.values()])
        return committed

    def masks(self, plan: StepPlan) -> list[bytes | None]:
        """What each row of a step may sample. Called when every step before it has been committed."""
        masks: list[bytes | None] = []
        for row in plan.rows:
            seq = self._held[row.seq_id]
            live = row.samples and seq.outcome is None
            masks.append(seq.constraint.mask() if live and seq.constraint is not None else None)
        return masks

    def abort(self, client: bytes, request_id: int) -> None:
        """Ends a request whose frontend wants no more of it. Idempotent."""
        seq = self._open.get((client, request_id))
        if seq is not None:
            self.end(seq, Finished(request_id, FinishReason.ABORT))

    def abort_client(self, client: bytes) -> None:
        """Ends everything of a frontend that has gone."""
        for key in [key for key in self._open if key[0] == client]:
            self.abort(*key)

    def fail(self, seq_id: int, code: ErrorCode, message: str) -> None:
        """Ends one running request in an error."""
        seq = self._held[seq_id]
        self.end(seq, Failure(seq.request_id, code, message))

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Ends every open request in an error and takes everything back, in flight or not.

        Only for an engine that will not touch the device again.
        """
        for seq in list(self._open.values()):
            self.end(seq, Failure(seq.request_id, code, message))
        for seq in list(self._held.values()):
            seq.inflight = seq.unseen = 0
            self._bury(seq)

    def end(self, seq: Sequence, outcome: Finished | Failure) -> None:
        """Gives a sequence its one outcome; its leases stay while a step in flight holds it (I4)."""
        assert seq.outcome is None, f"second outcome {outcome} for {seq}"
        seq.outcome = outcome
        del self._open[seq.client, seq.request_id]
        self.ended.append(seq)
        self._unsettled.discard(seq.id)
        if self.running.pop(seq.id, None) is None:
            self.waiting.remove(seq)
        elif seq.inflight == 0:
            self._bury(seq)

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def _bury(self, seq: Sequence) -> None:
        assert seq.inflight == 0 and seq.unseen == 0, f"buried while in flight: {seq}"
        del self._held[seq.id]
        seq.leases.close()


def _row(seq: Sequence, length: int, pending: int) -> Row:
    """The next `length` positions of a sequence that is not plain."""
    start = seq.launched
    end = start + length
    return Row(
        seq.id,
        seq.row,
        start,
        length,
        length == pending,
        suppress_ends=end - seq.prompt_len < seq.min_tokens,
        constrained=seq.constraint is not None,
        tokens=seq.tokens[start : min(end, seq.uploads)].tobytes() if start < seq.uploads else b"",
        new_pages=tuple(seq.pages[seq.mapped :]),
        first_page=seq.mapped,
    )


def _admission(seq: Sequence) -> Admission:
    return Admission(
        seq.id,
        seq.row,
        seq.prompt_len,
        seq.params,
        tuple(seq.end_ids) if seq.min_tokens else (),
    )
