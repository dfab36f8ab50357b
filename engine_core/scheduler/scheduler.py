"""Which sequences run, and how each of them ends. Composes gates, planning and stopping; knows no device."""

from collections.abc import Iterable

from msgspec import Struct

from tandem.engine_core.contracts import Constraint, ConstraintAdvancer, Masks, StepLogprobs, TokenDelta
from tandem.engine_core.errors import RequestError
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import PageGate, RowGate, admit
from tandem.engine_core.scheduler.constrained import (
    advance_constraints,
    append,
    check_stop,
    get_masks,
    grammar_error,
    jump_forward,
)
from tandem.engine_core.scheduler.logprobs import attach
from tandem.engine_core.scheduler.planner import Planner, SchedulerLimits
from tandem.engine_core.scheduler.queue import Running, WaitingQueue
from tandem.engine_core.sequence import Sequence
from tandem.protocol.engine_options import Policy
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Started

MAX_BYPASSED = 64
"""So many at the head of the queue may wait for a page that another computes while those behind them are admitted."""


class Committed(Struct):
    """What a step's results meant."""

    deltas: dict[bytes, TokenDelta]
    """What each frontend gets."""
    tokens: int
    """How many in all."""
    zombies: int
    """Rows whose sequence had already ended."""


class Scheduler:
    """Continuous batching, or static.

    Life of a sequence: `add` (-> compiling -> `constrain`) -> waiting -> `admit_waiting` -> running -> rows in steps
    (`plan_step`, `on_launch`, `commit`) -> an outcome -> leases closed once no step in flight holds it (I4). One that
    is preempted goes back to waiting, again when no step holds it. Whoever ends stands in `ended` exactly once (I8)
    until the engine takes it from there.
    """

    def __init__(
        self,
        rows: RowGate,
        memory: KVManager,
        limits: SchedulerLimits,
        advancer: ConstraintAdvancer,
        policy: Policy = "fcfs",
    ) -> None:
        self.rows = rows
        self.memory = memory
        self.limits = limits
        self.advancer = advancer
        self.compiling: dict[int, Sequence] = {}
        """Accepted, but their grammar is not ready: they hold up nobody."""
        self.waiting = WaitingQueue(policy == "priority")
        self.ended: list[Sequence] = []
        self.preemptions = 0
        self._gates = (rows, PageGate(memory, limits.prefill_chunk and limits.max_step_tokens))
        self.planner = Planner(memory, limits, policy, self.preempt)
        self._running = Running()
        self._open: dict[tuple[bytes, int], Sequence] = {}
        self._held: dict[int, Sequence] = {}
        """Every sequence whose leases are open, zombies too."""
        self._preempting: list[Sequence] = []
        """Preempted ones that a step in flight still holds."""
        self._started: list[tuple[bytes, Started]] = []
        self._refused = (-1, -1)
        """Whom the gates refused last, and when by `KVManager.moves`: until it moves they would again."""
        self._newest_step = 0
        self._now = 0.0

    @property
    def num_open(self) -> int:
        """Sequences that are still owed a terminal event."""
        return len(self._open)

    @property
    def running(self) -> dict[int, Sequence]:
        """By id, in the order of admission."""
        return self._running.members

    @property
    def policy(self) -> Policy:
        return self.planner.policy

    @property
    def held(self) -> Iterable[Sequence]:
        return self._held.values()

    def is_open(self, client: bytes, request_id: int) -> bool:
        return (client, request_id) in self._open

    def add(self, seq: Sequence) -> None:
        """Accepts a sequence. Raises RequestError, with the numbers, if it can never fit or the queue is full."""
        needed, total = self.memory.needed(seq.kv_len), self.memory.pages.total
        if needed > total:
            raise RequestError(
                ErrorCode.KV_CAPACITY,
                f"{seq.prompt_len} prompt tokens and max_tokens {seq.params.max_tokens} need {needed} KV pages of "
                f"{self.memory.page_size} tokens, the pool has {total}; lower max_tokens or raise --kv-tokens",
            )
        waiting = len(self.waiting) + len(self.compiling)
        if waiting >= self.limits.max_waiting + self.rows.free:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{waiting} requests are waiting already, beside {self.rows.free} free rows "
                f"--max-waiting allows {self.limits.max_waiting}; retry later",
            )
        if seq.session:
            self.memory.sessions.check(seq.session)
            self.memory.sessions.begin(seq.session, seq.id)
        self._open[seq.client, seq.request_id] = seq
        if seq.compiling:
            self.compiling[seq.id] = seq
        else:
            self.waiting.push(seq)

    def set_constraint(self, seq_id: int, result: Constraint | RequestError) -> None:
        """Puts a sequence whose grammar is ready where it belongs in the queue, or ends it if the grammar is not to be
        had. It may have ended by itself."""
        seq = self.compiling.get(seq_id)
        if seq is None:
            return
        if isinstance(result, RequestError):
            self.end(seq, Failure(seq.request_id, result.code, result.message))
            return
        del self.compiling[seq_id]
        seq.constraint, seq.compiling = result, False
        self.waiting.push(seq)

    def admit_waiting(self) -> list[Sequence]:
        """Moves sequences from the queue to running while every gate lets them; returns those moved.

        In order, but whoever would first have to compute a page that a running sequence is computing waits for that
        one without holding up the others.
        """
        if not self.rows.free or (self.running and self.planner.out_of_pages) or (self.limits.static and self._held):
            return []
        moved: list[Sequence] = []
        num_bypassed = 0
        for seq in self.waiting:
            if self.memory.awaits(seq):
                num_bypassed += 1
                if num_bypassed > MAX_BYPASSED:
                    break
                continue
            if self._refused == (seq.id, self.memory.moves):
                break
            if not admit(seq, self._gates):
                self._refused = (seq.id, self.memory.moves)
                break
            self.waiting.remove(seq)
            self._held[seq.id] = seq
            self._running.enter(seq)
            moved.append(seq)
        return moved

    def start(self, seq: Sequence) -> TokenDelta:
        """What the grammar of a sequence that was just admitted forces it to go on with."""
        delta = TokenDelta([], [])
        self._jump_forward(seq, delta)
        if delta.tokens:
            self._report_start(seq)
        return delta

    def _report_start(self, seq: Sequence) -> None:
        """Its first token is on its way."""
        if seq.num_cached_tokens and not seq.start_reported:
            self._started.append((seq.client, Started(seq.request_id, seq.num_cached_tokens)))
        seq.start_reported = True

    def plan_step(self, step_id: int) -> StepPlan | None:
        """The next step over the running sequences, or None.

        Counters change at launch and commit alone; planning finds pages, so planning again gives the same plan.
        """
        return self.planner.plan(step_id, self._running, self._held.values(), self._newest_step)

    def on_launch(self, plan: StepPlan) -> None:
        """Counts a plan that is now on the device."""
        held, self._newest_step = self._held, plan.step_id
        if plan.is_decode_only:
            for row in plan.rows:
                seq = held[row.seq_id]
                seq.num_scheduled_tokens += 1
                seq.inflight += 1
                seq.num_inflight_samples += 1
        else:
            for row in plan.rows:
                seq = held[row.seq_id]
                seq.num_scheduled_tokens = row.start + row.length
                seq.inflight += 1
                if row.samples:
                    seq.num_inflight_samples += 1
        for row in plan.updated_rows:
            held[row.seq_id].map(row.first_page + len(row.new_pages), self.memory.page_size)
        if self._running.unsteady:
            self._settle(plan)

    def _settle(self, plan: StepPlan) -> None:
        """What a launch means for the sequences that are not plain, and for those that had no row in it."""
        served = {row.seq_id: row for row in plan.rows}
        unsteady = self._running.unsteady
        for seq_id in [seq_id for seq_id in unsteady if seq_id in served]:
            seq, row = self.running[seq_id], served[seq_id]
            seq.on_launch()
            if row.tokens:
                self.memory.publish(seq, plan.step_id)
            if row.samples:
                self._report_start(seq)
            if seq.in_steady_decode:
                unsteady.discard(seq_id)
        for seq in self.running.values():
            seq.steps_skipped = 0 if seq.id in served else seq.steps_skipped + 1

    def commit(self, plan: StepPlan, tokens: list[int], logprobs: StepLogprobs | None = None) -> Committed:
        """Takes the results of the oldest step: appends tokens, ends sequences, buries zombies."""
        committed = Committed({}, 0, 0)
        deltas, held = committed.deltas, self._held
        refused = advance_constraints(self.advancer, plan, tokens, held) if plan.needs_mask else set()
        if logprobs is not None:
            attach(plan.rows, held, refused, logprobs, deltas)
        delta = TokenDelta([], [])
        client, append_id, append_token = None, delta.request_ids.append, delta.tokens.append
        for row, token in zip(plan.rows, tokens, strict=True):
            seq = held[row.seq_id]
            seq.inflight -= 1
            if row.samples:
                seq.num_inflight_samples -= 1
            if seq.outcome is not None:
                committed.zombies += 1
                if seq.inflight == 0:
                    self._release(seq)
            elif seq.constraint is not None:
                if row.samples:
                    self._commit_constrained(
                        seq, token, seq.id in refused, deltas.setdefault(seq.client, TokenDelta([], []))
                    )
            elif row.samples:
                known = seq.tokens
                known.append(token)
                if seq.client is not client:
                    client = seq.client
                    delta = deltas.setdefault(client, TokenDelta([], []))
                    append_id, append_token = delta.request_ids.append, delta.tokens.append
                append_id(seq.request_id)
                append_token(token)
                if token in seq.end_ids or len(known) >= seq.total_len:
                    outcome = check_stop(seq)
                    if outcome is not None:
                        self.end(seq, outcome)
        if self._preempting:
            self._requeue()
        self.memory.settle(plan.step_id)
        committed.tokens = sum([len(delta.tokens) for delta in deltas.values()])
        return committed

    def _commit_constrained(self, seq: Sequence, token: int, refused: bool, delta: TokenDelta) -> None:
        """Commits a token of a sequence that has to follow a grammar."""
        if refused:
            self.end(seq, grammar_error(seq))
            return
        outcome = append(seq, token, delta)
        if outcome is not None:
            self.end(seq, outcome)
        elif seq.num_inflight_samples == 0:
            self._jump_forward(seq, delta)

    def _jump_forward(self, seq: Sequence, delta: TokenDelta) -> None:
        """Appends what the grammar forces, which may end the sequence."""
        outcome = jump_forward(self.advancer, seq, delta)
        if outcome is not None:
            self.end(seq, outcome)
        elif not seq.in_steady_decode and seq.id in self.running:
            self._running.unsteady.add(seq.id)

    def masks(self, plan: StepPlan) -> Masks:
        """What the rows of a step may sample. Called when every step before it has been committed."""
        return get_masks(plan, self._held)

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
            seq.inflight = seq.num_inflight_samples = 0
            self._release(seq)
        self.memory.abandon()

    def end(self, seq: Sequence, outcome: Finished | Failure) -> None:
        """Gives a sequence its one outcome; its leases stay while a step in flight holds it (I4)."""
        assert seq.outcome is None, f"second outcome {outcome} for {seq}"
        seq.outcome = outcome
        del self._open[seq.client, seq.request_id]
        self.ended.append(seq)
        self._running.leave(seq)
        if seq.session:
            self.memory.end_turn(seq, self._newest_step, self._now)
        if self.compiling.pop(seq.id, None) is not None:
            return
        if seq.id not in self._held:
            self.waiting.remove(seq)
            return
        if seq in self._preempting:
            self._preempting.remove(seq)
        if seq.inflight == 0:
            self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Stops a running sequence, to go on later: no new rows; what is in flight still commits, and then it waits
        again."""
        assert seq.outcome is None and seq.id in self.running, f"preempted without running: {seq}"
        self._running.leave(seq)
        self.preemptions += 1
        self._preempting.append(seq)
        self._requeue()

    def _requeue(self) -> None:
        """Puts preempted sequences back into the queue that nothing in flight holds any more."""
        for seq in [seq for seq in self._preempting if seq.inflight == 0]:
            self._preempting.remove(seq)
            del self._held[seq.id]
            seq.restart()
            seq.leases.close()
            seq.queued_at = self._now
            self.waiting.push(seq)

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def take_started(self) -> list[tuple[bytes, Started]]:
        """What frontends should know of sequences whose first token has been launched since the last call."""
        started, self._started = self._started, []
        return started

    def set_policy(self, policy: Policy) -> None:
        """Changes the policy from the next step and the next admission on."""
        self.planner.policy = policy
        self.waiting.reorder(policy == "priority")

    def advance(self, now: float) -> None:
        """Tells the time, in seconds: sessions that were idle for too long end."""
        self._now = now
        self.memory.sessions.expire(now)

    def audit(self) -> list[str]:
        """What is wrong with pages and rows, a line each. Empty when all is well."""
        problems = self.memory.audit(self._held.values())
        if self.rows.free + len(self._held) != self.rows.total:
            problems.append(f"{self.rows.free} of {self.rows.total} rows are free, {len(self._held)} are held")
        return problems

    def _release(self, seq: Sequence) -> None:
        assert seq.inflight == 0 and seq.num_inflight_samples == 0, f"buried while in flight: {seq}"
        del self._held[seq.id]
        seq.leases.close()
