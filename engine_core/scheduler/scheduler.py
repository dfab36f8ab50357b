"""State of every open request, from its arrival to its outcome.

The scheduler composes the gates, the planner and the stop checks; it knows neither device nor wire.
"""

from collections import Counter
from collections.abc import Iterable, Set
from collections.abc import Sequence as Items

from tandem.engine_core.contracts import NO_TOKEN, Constraint, MaskedRows, StepResult, TokenDelta
from tandem.engine_core.errors import RequestError
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.lora.adapters import Adapters
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.scheduler.admission import Admission, RowGate
from tandem.engine_core.scheduler.commit import SchedulerUpdates, StepMasks, append_tokens, check_stop, jump_forward
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.draft_spans import note_positions, note_spans
from tandem.engine_core.scheduler.logprobs import add_logits, add_logprobs
from tandem.engine_core.scheduler.planner import Planner, SchedulerLimits
from tandem.engine_core.scheduler.queue import QueuedPrompts, RunningSequences, WaitingQueue, queue_full
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts, StepWork
from tandem.engine_core.sequence import RequestGroup, Sequence
from tandem.engine_core.weight_version import WeightVersion
from tandem.protocol.engine_options import Policy
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished


class Scheduler:
    """Continuous batching, or static batching if `limits.static` is set.

    Life of a sequence: `add` (-> compiling -> `set_constraint`) -> waiting -> `admit_waiting` -> running -> rows in
    steps (`plan_step`, `on_launch`, `commit`) -> an outcome -> leases closed once no step in flight holds it (I4).

    A preempted sequence returns to waiting, also once no step holds it. Starts, tokens and ends collect in `updates`.
    `commit` returns them with those of its step, `take_updates` what happens between commits, such as aborts.
    """

    def __init__(
        self,
        rows: RowGate,
        memory: KVManager,
        limits: SchedulerLimits,
        policy: Policy = "fcfs",
        costs: StepCosts | None = None,
        drafts: DraftPolicy | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Keep the parts of a scheduler.

        costs: expected durations of steps; None: they are not known, and prompts are not limited by them; drafts:
        numbers of drafts that steps verify; None: none do; adapters: None if no sequence has one.
        """
        self.rows = rows
        self.memory = memory
        self.limits = limits
        self.compiling: dict[int, Sequence] = {}
        """Accepted sequences that wait for the compilation of their grammar; they block no other."""
        self.waiting = WaitingQueue(policy == "priority")
        self.queued = QueuedPrompts()
        self.updates = SchedulerUpdates()
        self.preemptions = 0
        costs = costs or StepCosts({}, AttentionShare())
        self.planner = Planner(memory, limits, policy, costs, drafts or DraftPolicy(()), self.preempt)
        self.adapters = adapters
        self._admission = Admission(rows, memory, _first_chunk(memory, limits), adapters)
        self._running = RunningSequences()
        self._open: dict[tuple[bytes, int], Sequence] = {}
        self._held: dict[int, Sequence] = {}
        """Sequences with open leases, including zombies, by id."""
        self._preempting: list[Sequence] = []
        """Preempted sequences that a step in flight still holds."""
        self._masks = StepMasks(self._held)
        self._groups: dict[bytes, RequestGroup] = {}
        """Group of the last sequence of each frontend."""
        self._now = 0.0

    @property
    def num_open(self) -> int:
        """Number of sequences without an outcome."""
        return len(self._open)

    @property
    def running(self) -> dict[int, Sequence]:
        """Running sequences by id, in the order of admission."""
        return self._running.members

    @property
    def policy(self) -> Policy:
        """Name of the policy in force."""
        return self.planner.policy

    @property
    def held(self) -> Iterable[Sequence]:
        """Sequences with open leases: running, preempted in flight, or zombies."""
        return self._held.values()

    def is_open(self, client: bytes, request_id: int) -> bool:
        """Return whether a request of this frontend has no outcome yet."""
        return (client, request_id) in self._open

    def add(self, seq: Sequence) -> None:
        """Accept a sequence.

        Raises RequestError, with the numbers, if it can never fit or the queue is full.
        """
        self.memory.check_fits(seq, whole=not self.limits.prefill_chunk)
        waiting = len(self.waiting) + len(self.compiling)
        if waiting >= self.limits.max_waiting + self.rows.free:
            raise queue_full(waiting, self.rows.free, self.limits.max_waiting)
        if seq.submit.session:
            self.memory.sessions.check(seq.submit.session)
            self.memory.sessions.begin_turn(seq.submit.session, seq.id)
        self._open[seq.client, seq.request_id] = seq
        # A frontend submits the sequences of an HTTP request one after the other.
        if (group := self._groups.get(seq.client)) is not None and group.id == seq.group.id:
            seq.group = group
        self._groups[seq.client] = seq.group
        if self.adapters is not None and seq.adapter is not None:
            self.adapters.open(seq.adapter)
        seq.use_weights(self.memory.weights)
        self.queued.add(seq)
        if seq.compiling:
            self.compiling[seq.id] = seq
        else:
            self.waiting.push(seq)

    def set_constraint(self, seq_id: int, result: Constraint | RequestError) -> None:
        """Queue a sequence after the compilation of its grammar, or end it if that failed.

        A sequence that has ended is ignored.
        """
        seq = self.compiling.get(seq_id)
        if seq is None:
            return
        if isinstance(result, RequestError):
            self.end(seq, Failure(seq.request_id, result.code, result.message, result.retry_after))
            return
        del self.compiling[seq_id]
        seq.constraint, seq.compiling = result, False
        self.waiting.push(seq)

    def admit_waiting(self, begun_only: bool = False) -> list[Sequence]:
        """Move sequences from the queue to running while every gate accepts them.

        Return those moved, in the order of the queue. The tokens that a grammar forces at the beginning of a sequence
        are appended at once, which may end it: call again until nothing is moved. begun_only: True to move only
        sequences of requests that have begun.
        """
        if not self.rows.free or (self.running and self.planner.out_of_pages) or (self.limits.static and self._held):
            return []
        moved = self._admission.admit(self.waiting, begun_only)
        for seq in moved:
            seq.group.has_begun = True
            self._held[seq.id] = seq
            self._running.add(seq)
        for seq in [seq for seq in moved if seq.constraint is not None]:
            self._begin_constrained(seq)
        return moved

    def _begin_constrained(self, seq: Sequence) -> None:
        """Append the tokens that the grammar forces at the beginning of a sequence, as output."""
        before = len(seq.tokens)
        self._apply_forced_tokens(seq)
        if len(seq.tokens) > before:
            self.updates.report_start(seq)
            self.queued.remove(seq.id)

    def plan_step(self, step_id: int) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute.

        It reports starts and allocates pages; counters change at launch and commit, so planning again changes nothing.
        """
        plan = self.planner.plan(step_id, self._running, self._held.values())
        for new in plan.admitted if plan is not None else ():
            self.updates.report_start(self._held[new.seq_id])
        return plan

    def on_launch(self, plan: StepPlan) -> None:
        """Advance the counters of the sequences in a plan that has been launched."""
        held = self._held
        num_drafts = plan.num_drafts
        for row in plan.steady_rows:
            seq = held[row.seq_id]
            seq.num_scheduled_tokens += 1
            seq.inflight += 1
            seq.num_inflight_samples += 1
            if num_drafts and seq.drafts.max_drafts:
                seq.num_inflight_drafts += num_drafts
        for row in plan.other_rows:
            seq = held[row.seq_id]
            seq.num_scheduled_tokens = row.start + row.length
            seq.inflight += 1
            if row.samples:
                seq.num_inflight_samples += 1
        if (plan.saves or plan.loads) and self.memory.states is not None:
            self.memory.states.on_launch(plan)
        has_model = self.planner.drafts.has_model
        if has_model:
            note_spans(plan, held, self.memory)
        for row in plan.updated_rows:
            self.memory.on_launch(held[row.seq_id], row)
        if has_model:
            note_positions(plan, held, self.planner.graph_rows(plan))
        if self._running.unsteady:
            self._update_unsteady(plan)
            self._running.count_skipped(plan.rows)

    def _update_unsteady(self, plan: StepPlan) -> None:
        """Update sequences outside steady decode after a launch."""
        unsteady = self._running.unsteady
        for row in [row for row in plan.rows if row.seq_id in unsteady]:
            seq = self.running[row.seq_id]
            seq.on_launch()
            if row.samples:
                self.updates.report_start(seq)  # A prompt may have found more in the cache since it was admitted.
                self.queued.on_sample(row.seq_id, plan.step_id)
            if seq.in_steady_decode:
                unsteady.discard(row.seq_id)

    def commit(self, plan: StepPlan, result: StepResult, advanced: Set[int] = frozenset()) -> SchedulerUpdates:
        """Apply the results of the oldest step; return the updates.

        Appends tokens, ends sequences and releases zombies. A row of a step that verifies drafts has a run of tokens;
        those after the one that ends the sequence are dropped.

        advanced: rows whose constraint has already accepted this step's token (`GrammarAdvancer.finish`).
        """
        held = self._held
        self.updates.first_tokens += [held[seq_id] for seq_id in self.queued.on_commit(plan.step_id)]
        if result.milliseconds:
            self.planner.costs.correct(StepWork.of(plan.rows, plan.num_drafts), result.milliseconds)
        live: list[Sequence | None] = []
        known: list[int] = []
        if result.logprobs is not None:
            sequences = [held[row.seq_id] for row in plan.rows]
            live = [seq if seq.outcome is None else None for seq in sequences]
            known = [len(seq.tokens) for seq in sequences]
        if plan.num_drafts:
            self._commit_runs(plan, result, advanced)
        elif (advanced or plan.is_unconstrained) and result.has_single_tokens(len(sampled := plan.sampled_rows)):
            self._commit_single_tokens(plan, sampled, result.tokens, advanced)
        else:
            for row, run in zip(plan.rows, result.runs(), strict=True):
                self._commit_run(row, run, row.row in advanced)
        if result.logprobs is not None:
            add_logprobs(plan.rows, live, known, result, self.updates.deltas)
            if result.logits:
                add_logits(plan.rows, live, result.logits, self.updates.deltas)
        if self._preempting:
            self._requeue()
        return self.take_updates()

    def _commit_run(self, row: ScheduledSequence, run: Items[int], is_advanced: bool) -> None:
        """Commit a row of any kind but one with drafts: a chunk, one with a grammar, one token."""
        seq = self._held[row.seq_id]
        seq.inflight -= 1
        # By the grammar, after this step was launched. Such a row has no drafts, so its start is exact.
        was_forced = row.constrained and row.start + row.length < len(seq.tokens)
        if row.samples and not was_forced:
            seq.num_inflight_samples -= 1
        if seq.outcome is not None:
            self._on_zombie(seq)
        elif run and (not was_forced or NO_TOKEN in run):
            outcome = append_tokens(seq, run, self.updates, is_advanced)
            if outcome is not None:
                self.end(seq, outcome)
            elif seq.constraint is not None:
                self._apply_forced_tokens(seq, is_advanced)
        elif row.samples and not run:
            self._leave_steady_decode(seq)  # Its next position has no token yet.

    def _commit_runs(self, plan: StepPlan, result: StepResult, advanced: Set[int]) -> None:
        """Commit a run of tokens for each row of a step that verified drafts.

        The loop is written out for speed, like that of `_commit_single_tokens`.
        """
        held, end = self._held, 0
        client, delta = None, TokenDelta([], [])
        predicted, has_failed = result.predicted or [False] * len(plan.rows), NO_TOKEN in result.tokens
        has_model, verified = self.planner.drafts.has_model, list[tuple[int, int]]()
        columns = zip(plan.rows, result.counts, result.num_drafts, predicted, strict=True)
        for row, count, num_drafts, is_predicted in columns:
            run = result.tokens[end : end + count]
            end += count
            if row.constrained:
                self._commit_run(row, run, row.row in advanced)
                continue
            seq = held[row.seq_id]
            stats = seq.drafts
            seq.inflight -= 1
            seq.num_inflight_samples -= 1
            if stats.max_drafts:
                seq.num_inflight_drafts -= plan.num_drafts
            if seq.outcome is not None:
                if run:  # What its row has on the device counts when its recurrent state is kept.
                    seq.num_scheduled_tokens += count - 1
                self._on_zombie(seq)
                continue
            assert run, f"no token for {seq}, which has not ended"
            if seq.client is not client:
                client, delta = seq.client, self.updates.delta(seq.client)
                request_ids, tokens = delta.request_ids, delta.tokens
            known, accepted = seq.tokens, count - 1
            before = len(known)
            if has_failed or before + count >= seq.total_len or not seq.end_ids.isdisjoint(run):
                outcome = append_tokens(seq, run, self.updates)
            else:
                outcome = None
                known.fromlist(run)
                request_ids += [seq.request_id] * count
                tokens += run
            # The device has computed the positions of the drafts that it accepted, also of those after a stop. A later
            # step in flight counts one that it does not compute if these tokens are the last.
            scheduled = seq.num_scheduled_tokens + accepted
            seq.num_scheduled_tokens = scheduled if scheduled < seq.total_len else seq.kv_len
            if stats.max_drafts and before + 1 < seq.total_len:  # The last token of a row has no draft.
                verified.append((num_drafts, accepted))
                stats.drafted += num_drafts
                stats.accepted += accepted
            if num_drafts:
                if has_model:
                    # All accepted drafts but the last of the row were inputs of the draft model.
                    stats.model_len = before + min(count, num_drafts) - 1
                delta.drafted.append(seq.request_id)
                delta.drafts.extend((num_drafts, accepted, is_predicted))
            if outcome is not None:
                self.end(seq, outcome)
        self.updates.verified = Counter(verified)
        self.planner.drafts.observe(self.updates.verified)

    def _commit_single_tokens(
        self, plan: StepPlan, sampled: tuple[ScheduledSequence, ...], tokens: list[int], advanced: Set[int]
    ) -> None:
        """Commit one token for each of the rows that sample.

        The effect equals `_commit_run`. The loop is written out for speed: a call of `append_tokens` for each row makes
        a tick of 256 rows 7 % longer, one of `Constraint.accept` more.
        """
        held = self._held
        client, delta = None, TokenDelta([], [])
        append_id, append_token = delta.request_ids.append, delta.tokens.append
        for seq in [held[row.seq_id] for row in plan.chunk_rows]:
            seq.inflight -= 1
            if seq.outcome is not None:
                self._on_zombie(seq)
        for row, token in zip(sampled, tokens, strict=True):
            seq = held[row.seq_id]
            if row.constrained and not (row.row in advanced and seq.in_steady_decode):
                self._commit_run(row, (token,), row.row in advanced)
                continue
            seq.inflight -= 1
            seq.num_inflight_samples -= 1
            if seq.outcome is not None:
                self._on_zombie(seq)
                continue
            if seq.client is not client:
                client, delta = seq.client, self.updates.delta(seq.client)
                append_id, append_token = delta.request_ids.append, delta.tokens.append
            known = seq.tokens
            known.append(token)
            append_id(seq.request_id)
            append_token(token)
            if token in seq.end_ids or len(known) >= seq.total_len:
                outcome = check_stop(seq)
                if outcome is not None:
                    self.end(seq, outcome)

    def _on_zombie(self, seq: Sequence) -> None:
        """Count a row of an ended sequence; the last such row releases it."""
        self.updates.num_zombies += 1
        if seq.inflight == 0:
            self._release(seq)

    def _apply_forced_tokens(self, seq: Sequence, is_advanced: bool = False) -> None:
        """Append the tokens that the grammar forces, which may end the sequence."""
        known = len(seq.tokens)
        outcome = None if is_advanced else jump_forward(seq, self.updates, self._running.min_jump)
        if len(seq.tokens) > known:
            self._masks.drop(seq.id)
        if outcome is not None:
            self.end(seq, outcome)
        elif not seq.in_steady_decode:
            self._leave_steady_decode(seq)

    def _leave_steady_decode(self, seq: Sequence) -> None:
        """Have the planner check what a sequence needs for its next row."""
        seq.in_steady_decode = False
        if seq.id in self.running:
            self._running.unsteady.add(seq.id)

    def take_updates(self) -> SchedulerUpdates:
        """Return the updates since the last call and begin new ones."""
        updates, self.updates = self.updates, SchedulerUpdates()
        return updates

    @property
    def min_jump(self) -> int:
        """Minimum number of samples that forced tokens must save to be appended at once."""
        return self._running.min_jump

    def masks(self, plan: StepPlan) -> MaskedRows:
        """Return the constraints that sampling the newest step needs."""
        return self._masks.of(plan)

    def abort(self, client: bytes, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request that its frontend wants no more of; do nothing if it has ended."""
        seq = self._open.get((client, request_id))
        if seq is not None:
            self.end(seq, Finished(request_id, reason))

    def abort_client(self, client: bytes) -> None:
        """End every request of a frontend that has disconnected."""
        self._groups.pop(client, None)
        for key in [key for key in self._open if key[0] == client]:
            self.abort(*key)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every open request in an error."""
        for seq in list(self._open.values()):
            self.end(seq, Failure(seq.request_id, code, message))

    @property
    def num_begun(self) -> int:
        """Number of sequences without an outcome of requests that have begun."""
        return len(self._begun())

    def fail_begun(self, code: ErrorCode, message: str) -> None:
        """End every sequence of the requests that have begun in an error."""
        for seq in self._begun():
            self.end(seq, Failure(seq.request_id, code, message))

    def _begun(self) -> list[Sequence]:
        """Return the sequences of HTTP requests of which one has been admitted, also those that still wait."""
        waiting = [seq for seq in (*self.waiting, *self.compiling.values()) if seq.group.has_begun]
        return [*self.running.values(), *self._preempting, *waiting]

    def abandon(self) -> None:
        """Release every ended sequence, in flight or not.

        Only for an engine that will not touch the device again.
        """
        for seq in list(self._held.values()):
            seq.inflight = seq.num_inflight_samples = seq.num_inflight_drafts = 0
            self._release(seq)

    def end(self, seq: Sequence, outcome: Finished | Failure) -> None:
        """Give a sequence its one outcome.

        Its leases stay open while a step in flight holds it (I4).
        """
        assert seq.outcome is None, f"second outcome {outcome} for {seq}"
        seq.outcome = outcome
        del self._open[seq.client, seq.request_id]
        if self.adapters is not None and seq.adapter is not None:
            self.adapters.close(seq.adapter)
        self.queued.remove(seq.id)
        self.updates.ended.append(seq)
        self._masks.drop(seq.id)
        self._running.remove(seq)
        if seq.submit.num_verified:
            self.memory.truncate(seq, seq.cacheable_len)
        if seq.submit.session:
            self.memory.end_turn(seq, self._now)
        if self.compiling.pop(seq.id, None) is not None:
            return
        if seq.id not in self._held:
            self.waiting.remove(seq)
            self.memory.forget(seq)
            return
        if seq in self._preempting:
            self._preempting.remove(seq)
        if seq.inflight == 0:
            self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Stop a running sequence: it commits the steps in flight, then waits again."""
        assert seq.outcome is None and seq.id in self.running, f"preempted without running: {seq}"
        self._running.remove(seq)
        self.preemptions += 1
        self._preempting.append(seq)
        self._requeue()

    def _requeue(self) -> None:
        """Return preempted sequences to the queue once no step in flight holds them."""
        for seq in [seq for seq in self._preempting if seq.inflight == 0]:
            self._preempting.remove(seq)
            del self._held[seq.id]
            seq.restart()
            seq.leases.close()
            seq.use_weights(self.memory.weights)
            seq.queued_at = self._now
            self.waiting.push(seq)

    def change_weights(self, version: WeightVersion, keeps_rows: bool) -> None:
        """Use other weights from now on; no step may be in flight.

        Sequences without pages are computed by them from the beginning. keeps_rows: True to have running sequences
        continue with their KV; otherwise all their tokens are computed again.
        """
        assert all(seq.outcome is None and not seq.inflight for seq in self._held.values()), "a step is in flight"
        self.memory.change_weights(version, self._held.values())
        for seq in () if keeps_rows else list(self.running.values()):
            self.preempt(seq)
        for seq in [*self.waiting, *self.compiling.values()]:
            self.memory.forget(seq)
            seq.use_weights(version)
        for seq in self.running.values():
            seq.weights = version
            self.updates.report_start(seq)

    def set_policy(self, policy: Policy) -> None:
        """Change the policy from the next step and the next admission on."""
        self.planner.policy = policy
        self.waiting.reorder(policy == "priority")

    def advance(self, now: float) -> None:
        """Set the time, in seconds, and expire sessions that have been idle for too long."""
        self._now = now
        self.memory.sessions.expire(now)

    def advance_adapters(self, now: float) -> None:
        """Advance the adapters, and end the waiting sequences of those that could not be loaded. now: seconds."""
        if self.adapters is None:
            return
        for adapter, problem in self.adapters.advance(now).items():
            message = f"the adapter {adapter.name!r} could not be loaded: {problem}"
            for seq in [seq for seq in self.waiting if seq.adapter is adapter]:
                self.end(seq, Failure(seq.request_id, ErrorCode.ADAPTER_FAILED, message))

    def audit(self) -> list[str]:
        """Return the inconsistencies of pages and rows; empty if there are none."""
        problems = self.memory.audit(self._held.values(), self.waiting)
        if self.rows.free + len(self._held) != self.rows.total:
            problems.append(f"{self.rows.free} of {self.rows.total} rows are free, {len(self._held)} are held")
        return problems

    def _release(self, seq: Sequence) -> None:
        """Close the leases of a sequence that no step in flight holds."""
        assert seq.inflight == 0 and seq.num_inflight_samples == 0, f"released while in flight: {seq}"
        del self._held[seq.id]
        seq.leases.close()


def _first_chunk(memory: KVManager, limits: SchedulerLimits) -> int:
    """Return the number of positions for which an admitted prompt gets pages; 0: all.

    A step could compute `max_step_tokens`. With windows a prompt gives up most of these pages again, so it begins with
    the pages of a chunk in a step with decoding rows, and gets more when it runs.
    """
    if memory.has_windows:
        return min(limits.prefill_chunk, limits.max_step_tokens)
    return limits.prefill_chunk and limits.max_step_tokens
