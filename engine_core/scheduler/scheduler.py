"""Which sequences run, and what the next step computes. Composes gates, policy and stopping; knows no device."""

from bisect import bisect
from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from engine_core.contracts import Constraint, Delta, Masks, StepLogprobs, Verifier
from engine_core.errors import RequestError
from engine_core.plan import Row, StepPlan
from engine_core.scheduler.admission import PageGate, RowGate, admit
from engine_core.scheduler.constrained import dead_end, jump_ahead, masks_of, refused_by
from engine_core.scheduler.logprobs import attach, most_wanted
from engine_core.scheduler.policy import choose_rows
from engine_core.scheduler.rows import admission_of, row_of, steady_rows, steady_rows_some_constrained
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

    Life of a sequence: `add` (-> compiling -> `constrain`) -> waiting -> `admit_waiting` -> running -> rows in steps
    (`plan_step`, `on_launch`, `commit`) -> an outcome -> leases closed once no step in flight holds it (I4). Whoever
    ends stands in `ended` exactly once (I8) until the engine takes it from there.
    """

    def __init__(self, rows: RowGate, pages: PageGate, limits: SchedulerLimits, verifier: Verifier) -> None:
        self.rows = rows
        self.pages = pages
        self.limits = limits
        self.verifier = verifier
        self.compiling: dict[int, Sequence] = {}
        """Accepted, but their grammar is not ready: they hold up nobody."""
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self._open: dict[tuple[bytes, int], Sequence] = {}
        self._held: dict[int, Sequence] = {}
        """Every sequence whose leases are open, zombies too."""
        self._unsettled: set[int] = set()
        """Running sequences that are not settled."""
        self._following: set[int] = set()
        """Running sequences that follow a grammar."""
        self._observed: dict[int, int] = {}
        """Running sequences that want log-probabilities, with the most alternatives that they want."""

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
        waiting = len(self.waiting) + len(self.compiling)
        if waiting >= self.limits.max_waiting + self.rows.free:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{waiting} requests are waiting already, beside {self.rows.free} free rows "
                f"--max-waiting allows {self.limits.max_waiting}; retry later",
            )
        self._open[seq.client, seq.request_id] = seq
        if seq.compiling:
            self.compiling[seq.id] = seq
        else:
            self.waiting.append(seq)

    def constrain(self, seq_id: int, result: Constraint | RequestError) -> None:
        """Puts a sequence whose grammar is ready where it belongs in the queue by its arrival, or ends it if the
        grammar is not to be had. It may have ended by itself."""
        seq = self.compiling.get(seq_id)
        if seq is None:
            return
        if isinstance(result, RequestError):
            self.end(seq, Failure(seq.request_id, result.code, result.message))
            return
        del self.compiling[seq_id]
        seq.constraint, seq.compiling = result, False
        self.waiting.insert(bisect(self.waiting, seq.id, key=lambda other: other.id), seq)

    def admit_waiting(self) -> list[Sequence]:
        """Moves sequences from the head of the queue to running while every gate lets them; returns those moved."""
        moved: list[Sequence] = []
        while self.waiting and admit(self.waiting[0], (self.rows, self.pages)):
            seq = self.waiting.popleft()
            self.running[seq.id] = self._held[seq.id] = seq
            self._unsettled.add(seq.id)
            if seq.constraint is not None:
                self._following.add(seq.id)
            wanted = most_wanted(seq)
            if wanted >= 0:
                self._observed[seq.id] = wanted
            moved.append(seq)
        return moved

    def start(self, seq: Sequence) -> Delta:
        """What the grammar of a sequence that was just admitted forces it to begin with."""
        delta = Delta([], [])
        self._jump(seq, delta)
        return delta

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
                Row(seq.id, seq.row, seq.launched, take, take == wanted, False, seq.constraint is not None)
                if seq.settled
                else row_of(seq, take, wanted)
                for seq, take, wanted in zip(candidates, takes, pending, strict=True)
                if take
            ]
        )
        if not rows:
            return None
        admitted = tuple([admission_of(self.running[row.seq_id]) for row in rows if row.start == 0])
        return StepPlan.of(step_id, rows, admitted, self._logprobs())

    def _plan_steady(self, step_id: int) -> StepPlan | None:
        """The same where the policy has nothing to choose: every sequence is settled, and the budget serves all."""
        running = self.running.values()
        rows = steady_rows_some_constrained(running) if self._following else steady_rows(running)
        if not rows:
            return None
        masked = bool(self._following) and any(row.constrained for row in rows)
        return StepPlan(step_id, rows, (), len(rows), masked, plain=not masked, single=True, logprobs=self._logprobs())

    def _logprobs(self) -> int:
        """As `StepPlan.logprobs`."""
        return max(self._observed.values()) if self._observed else -1

    def on_launch(self, plan: StepPlan) -> None:
        """Counts a plan that is now on the device."""
        held = self._held
        if plan.plain or not self._unsettled:
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
            if not seq.settled:
                seq.on_launch(len(row.new_pages))
                if seq.settled:
                    self._unsettled.discard(seq.id)

    def commit(self, plan: StepPlan, tokens: list[int], logprobs: StepLogprobs | None = None) -> Committed:
        """Takes the results of the oldest step: appends tokens, ends sequences, buries zombies."""
        committed = Committed({}, 0, 0)
        deltas, held = committed.deltas, self._held
        refused = refused_by(self.verifier, plan, tokens, held) if plan.needs_mask else set()
        if logprobs is not None:
            attach(plan.rows, held, refused, logprobs, deltas)
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
            elif seq.constraint is not None:
                if row.samples:
                    self._follow(seq, token, seq.id in refused, deltas.setdefault(seq.client, Delta([], [])))
            elif row.samples:
                known = seq.tokens
                known.append(token)
                if seq.client is not client:
                    client = seq.client
                    delta = deltas.setdefault(client, Delta([], []))
                    append_id, append_token = delta.request_ids.append, delta.tokens.append
                append_id(seq.request_id)
                append_token(token)
                if token in seq.end_ids or len(known) >= seq.total_len:
                    outcome = end_of(seq)
                    if outcome is not None:
                        self.end(seq, outcome)
        committed.tokens = sum([len(delta.tokens) for delta in deltas.values()])
        return committed

    def _follow(self, seq: Sequence, token: int, refused: bool, delta: Delta) -> None:
        """Commits a token of a sequence that has to follow a grammar."""
        if refused:
            self.end(seq, dead_end(seq))
            return
        seq.tokens.append(token)
        delta.request_ids.append(seq.request_id)
        delta.tokens.append(token)
        outcome = end_of(seq)
        if outcome is not None:
            self.end(seq, outcome)
        elif seq.unseen == 0:
            self._jump(seq, delta)

    def _jump(self, seq: Sequence, delta: Delta) -> None:
        """Appends what the grammar forces, which may end the sequence."""
        outcome = jump_ahead(self.verifier, seq, delta)
        if outcome is not None:
            self.end(seq, outcome)
        elif not seq.settled:
            self._unsettled.add(seq.id)

    def masks(self, plan: StepPlan) -> Masks:
        """What the rows of a step may sample. Called when every step before it has been committed."""
        return masks_of(plan, self._held)

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
        self._following.discard(seq.id)
        self._observed.pop(seq.id, None)
        if self.running.pop(seq.id, None) is not None:
            if seq.inflight == 0:
                self._bury(seq)
        elif self.compiling.pop(seq.id, None) is None:
            self.waiting.remove(seq)

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def _bury(self, seq: Sequence) -> None:
        assert seq.inflight == 0 and seq.unseen == 0, f"buried while in flight: {seq}"
        del self._held[seq.id]
        seq.leases.close()
