"""Plan a step: the positions of each row, and their pages.

There are three paths. The cheapest applicable one is used; all give the same rows as the last:

1. `_plan_steady`: all sequences are in steady decode. Each computes one position, so there is nothing to choose.
2. `_plan_mixed`: some are not, the policy puts decoding rows first, and the step has room for them. Those in
   steady decode are planned as in 1, and the policy chooses among the others.
3. `plan_general`: the policy chooses among all.

The stages are limits (`_budget`: positions, and time by `time_budget.py`), positions by the policy (`policy.py`), pages
(`preemption.py`), and rows (`step_rows.py`).
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from msgspec import Struct, structs

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.draft_spans import with_draft_spans
from tandem.engine_core.scheduler.policy import MAX_STEPS_SKIPPED, POLICIES, Budget, RowDemand, choose_rows
from tandem.engine_core.scheduler.preemption import PageReserver
from tandem.engine_core.scheduler.queue import RunningSequences
from tandem.engine_core.scheduler.step_costs import StepCosts
from tandem.engine_core.scheduler.step_rows import (
    build_row,
    build_steady_rows,
    build_steady_rows_some_constrained,
    insert_paged_rows,
    new_sequence,
)
from tandem.engine_core.scheduler.time_budget import fitting_tokens
from tandem.engine_core.sequence import Sequence
from tandem.protocol.engine_options import Policy


class SchedulerLimits(Struct, frozen=True):
    """Limits of a scheduler, fixed at start."""

    max_step_tokens: int
    """Maximum positions per step."""
    prefill_chunk: int
    """Largest number of positions of one prompt in a step that also decodes; 0: prompts are computed whole."""
    max_waiting: int
    """Requests that may wait when no row is free."""
    prompts_a_step: int = 0
    """Largest number of prompts in one step; 0: any number."""
    max_uploads: int = 65_536
    """Maximum cached prompt tokens uploaded per step; at least the length of the longest sequence."""
    static: bool = False
    """True for static batching: a batch runs to its end before the next is admitted."""
    max_itl: float | None = None
    """Maximum milliseconds of a step with decode rows; None: see `time_budget`."""
    chunk_grid: int = 0
    """Chunks of prompts end at multiples of this, if they reach one; 0: anywhere."""


def limit_uploads(candidates: Items[Sequence], lengths: list[int], budget: int) -> None:
    """Defer rows with more cached tokens than the step can still upload.

    The first row always fits. lengths: positions of each candidate, set to 0 here where the row is deferred; budget:
    tokens of one upload.
    """
    for index, seq in enumerate(candidates):
        if lengths[index] and seq.num_scheduled_tokens > seq.device.uploaded_len and not seq.in_steady_decode:
            skipped = seq.num_scheduled_tokens - seq.device.uploaded_len
            if skipped > budget:
                lengths[index] = 0
            else:
                budget -= skipped


def _on_grid(demand: RowDemand, candidates: Items[Sequence], grid: int) -> RowDemand:
    """Return the demand of rows with recurrent layers: they stop where a checkpoint is to be saved."""
    starts = [seq.num_scheduled_tokens for seq in candidates]
    pending = [
        min(wanted, seq.cache.cuts[0] - start) if seq.cache.cuts else wanted
        for seq, wanted, start in zip(candidates, demand.pending, starts, strict=True)
    ]
    return structs.replace(demand, pending=pending, starts=starts, grid=grid)


class Planner:
    """Build plans over the running sequences.

    Length limits are known in advance, since samples in flight count. End-of-sequence tokens are not: such a sequence
    may have one more row in flight, and is a zombie until that row is committed. The loops are written out for speed,
    as they run for every row of every step.
    """

    def __init__(
        self,
        memory: KVManager,
        limits: SchedulerLimits,
        policy: Policy,
        costs: StepCosts,
        drafts: DraftPolicy,
        preempt: Callable[[Sequence], None],
    ) -> None:
        """Keep the parts of a planner.

        preempt: function that takes a sequence out of the running ones.
        """
        self.memory = memory
        self.limits = limits
        self.policy = policy
        self.costs = costs
        self.drafts = drafts
        self._reserver = PageReserver(memory, preempt)

    @property
    def _is_limited_by_time(self) -> bool:
        """True if the expected duration of steps limits prompts."""
        return bool(self.costs.token_sizes and self.limits.prefill_chunk)

    @property
    def out_of_pages(self) -> bool:
        """True if a row of the last planned step found no page."""
        return self._reserver.out_of_pages

    def plan(
        self,
        step_id: int,
        running: RunningSequences,
        held: Collection[Sequence],
    ) -> StepPlan | None:
        """Return the next step, or None if no row can compute anything.

        held: all sequences that have pages.
        """
        plan, states = self._plan_rows(step_id, running, held), self.memory.states
        if plan is not None and running.adapted:
            plan = structs.replace(plan, has_adapters=True)
        if plan is not None and self.drafts.has_model:
            limits = self.limits.max_step_tokens, self.drafts.max_catch_up
            plan = with_draft_spans(plan, running.members, self.graph_rows(plan), *limits)
        return plan if plan is None or states is None else states.with_copies(plan)

    def graph_rows(self, plan: StepPlan) -> int:
        """Return the number of rows of a step's graph, or an upper bound."""
        return self.drafts.padded(len(plan.rows))

    def _plan_rows(self, step_id: int, running: RunningSequences, held: Collection[Sequence]) -> StepPlan | None:
        members = running.members
        if not running.unsteady and len(members) <= self.limits.max_step_tokens:
            steady = self._plan_steady(step_id, list(members.values()), running)
            if steady is not None:
                return steady if steady.rows else None
        for seq_id in running.unsteady:
            seq = members[seq_id]
            if seq.num_scheduled_tokens < seq.device.upload_end:
                self.memory.rematch(seq)
        # Under other policies, or with decode rows in more than half of the token budget, decode rows may have to wait.
        if self.policy == "fcfs" and 2 * len(members) <= self.limits.max_step_tokens:
            plan = self._plan_mixed(step_id, running, held)
            if plan is not None:
                return plan
        return self.plan_general(step_id, running, held)

    def _plan_steady(self, step_id: int, sequences: Items[Sequence], running: RunningSequences) -> StepPlan | None:
        """Return a step of sequences in steady decode; it may be empty.

        None if a page is missing. Nothing has to be chosen in such a step: each sequence has one position pending, at
        `num_scheduled_tokens`, and the budget serves all. Rows come in the order of the sequences, as in the next step:
        values derived from a step's masks are cached for steps with equal masks.
        """
        constrained = bool(running.constrained)
        rows = build_steady_rows_some_constrained(sequences) if constrained else build_steady_rows(sequences)
        updated_rows: tuple[ScheduledSequence, ...] = ()
        if len(rows) < len(sequences):
            others = [
                (index, seq)
                for index, seq in enumerate(sequences)
                if seq.next_page_boundary <= seq.num_scheduled_tokens
            ]
            if not self.memory.grow_each([seq for _, seq in others if seq.num_scheduled_tokens < seq.total_len - 1]):
                return None
            updated_rows = insert_paged_rows(rows, others, self.memory)
        self._reserver.out_of_pages = False
        needs_mask = constrained and any(row.constrained for row in rows)
        num_drafts = max_lead = 0
        if self.drafts.sizes:
            max_lead = max([seq.num_inflight_drafts for seq in sequences], default=0)
            if rows and len(sequences) == len(running.members):
                num_drafts = self.drafts.choose(sequences, bool(running.adapted))
        return StepPlan.decode_only(
            step_id,
            tuple(rows),
            needs_mask=needs_mask,
            logprobs=running.logprobs,
            updated_rows=updated_rows,
            num_drafts=num_drafts,
            max_lead=max_lead,
        )

    def _plan_mixed(self, step_id: int, running: RunningSequences, held: Collection[Sequence]) -> StepPlan | None:
        """Return the next step, with all rows in steady decode.

        The policy chooses among the others. None, for `plan_general` to choose among all, if no row is in steady
        decode, if pages are missing or a sequence was preempted for them, or if a prompt is overdue and no limit of
        time keeps it short: then decoding rows may have to wait for it.
        """
        members = running.members
        overdue = any(members[seq_id].steps_skipped >= MAX_STEPS_SKIPPED - 1 for seq_id in running.unsteady)
        if overdue and not self._is_limited_by_time:
            return None
        steady = self._plan_steady(step_id, [seq for seq in members.values() if seq.in_steady_decode], running)
        if steady is None or not steady.rows:
            return None
        others = [
            seq
            for seq in members.values()
            if not seq.in_steady_decode and len(seq.tokens) + seq.num_inflight_samples < seq.total_len
        ]
        if not others:
            return steady
        before = len(members)
        chosen = self._choose(others, members, held, len(steady.rows), sum([row.start for row in steady.rows]))
        if len(members) < before:  # One of the rows in steady decode may have been preempted.
            return None
        plan = self._plan_chosen(step_id, running, *chosen)
        return steady if plan is None else steady.followed_by(plan)

    def plan_general(self, step_id: int, running: RunningSequences, held: Collection[Sequence]) -> StepPlan | None:
        """Return the next step, with a choice among all rows.

        None if no row can compute anything.
        """
        members = running.members
        candidates = [seq for seq in members.values() if len(seq.tokens) + seq.num_inflight_samples < seq.total_len]
        return self._plan_chosen(step_id, running, *self._choose(candidates, members, held))

    def _plan_chosen(
        self, step_id: int, running: RunningSequences, candidates: Items[Sequence], lengths: Items[int]
    ) -> StepPlan | None:
        """Return the step with these positions of each candidate.

        None if it computes nothing.
        """
        rows = tuple(
            [
                ScheduledSequence(seq.id, seq.row, seq.num_scheduled_tokens, constrained=seq.constraint is not None)
                if seq.in_steady_decode and seq.num_scheduled_tokens < seq.next_page_boundary
                else build_row(seq, length, self.memory)
                for seq, length in zip(candidates, lengths, strict=True)
                if length
            ]
        )
        if not rows:
            return None
        new = [seq for seq, length in zip(candidates, lengths, strict=True) if length and not seq.device.uploaded_len]
        for seq in new:
            seq.drafts.max_drafts = self.drafts.max_drafts(seq)
        admitted = tuple([new_sequence(seq) for seq in new])
        plan = StepPlan.of(step_id, rows, admitted, running.logprobs)
        max_lead = max([seq.num_inflight_drafts for seq in candidates]) if self.drafts.sizes else 0
        return structs.replace(plan, max_lead=max_lead) if max_lead else plan

    def _choose(
        self,
        candidates: list[Sequence],
        running: dict[int, Sequence],
        held: Collection[Sequence],
        rows: int = 0,
        context: int = 0,
    ) -> tuple[list[Sequence], list[int]]:
        """Return the sequences that could compute, and the positions of each.

        rows, context: number of steady rows in the same step, and of the positions that they attend to.
        """
        self._reserver.out_of_pages, grid = False, self.limits.chunk_grid
        while True:
            demand = RowDemand(
                [len(seq.tokens) + seq.num_inflight_samples - seq.num_scheduled_tokens for seq in candidates],
                [seq.steps_skipped for seq in candidates],
                [seq.priority for seq in candidates],
            )
            if grid:
                demand = _on_grid(demand, candidates, grid)
            budget = self._budget(candidates, demand.pending, rows, context)
            lengths = choose_rows(POLICIES[self.policy], demand, budget)
            limit_uploads(candidates, lengths, self.limits.max_uploads)
            chosen = list(lengths)
            self._reserver.reserve(candidates, lengths, running, held)
            if grid:
                lengths = [demand.aligned(index, length) for index, length in enumerate(lengths)]
            if any(lengths) or not any(chosen):
                return candidates, lengths
            # None of the sequences that the policy prefers got a page. The others must not wait for them, because only
            # launched steps return pages.
            candidates = [
                seq for seq, length in zip(candidates, chosen, strict=True) if not length and seq.id in running
            ]

    def _budget(self, candidates: list[Sequence], pending: Items[int], num_steady: int, context: int) -> Budget:
        """Return the limits of a step.

        pending: positions that each candidate could compute; num_steady: number of steady rows in the same step;
        context: number of positions that these attend to.
        """
        limits, prompt_tokens = self.limits, 0
        if self._is_limited_by_time and max(pending, default=1) > 1:
            decoding, attended, prompts = num_steady, context, []
            for seq, wanted in zip(candidates, pending, strict=True):
                if wanted == 1:
                    decoding += 1
                    attended += seq.num_scheduled_tokens
                else:
                    prompts.append((seq.num_scheduled_tokens, wanted))
            copies = 0 if self.memory.states is None else self.memory.states.num_copies
            prompt_tokens = fitting_tokens(self.costs, decoding, attended, prompts, limits.max_itl, copies)
        tokens = limits.max_step_tokens - num_steady
        return Budget(tokens, limits.prefill_chunk, limits.prompts_a_step, prompt_tokens, num_steady > 0)
