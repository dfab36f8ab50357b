"""What the next step computes: policy and pages, then rows."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from msgspec import Struct

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.scheduler.policy import POLICIES, Budget, Wants, choose_rows
from tandem.engine_core.scheduler.preemption import PageReserver
from tandem.engine_core.scheduler.queue import Running
from tandem.engine_core.sequence import Sequence
from tandem.protocol.engine_options import Policy


class SchedulerLimits(Struct, frozen=True):
    max_step_tokens: int
    prefill_chunk: int
    """Positions of one prompt in a step that decodes, too; 0: prompts are computed whole."""
    max_waiting: int
    prompts_a_step: int = 0
    """0: any number."""
    max_uploads: int = 65_536
    """Cached prompt tokens that one step may bring to the device; at least as many as the longest sequence has."""
    static: bool = False
    """Static batching: a batch runs to its end before the next is admitted."""


def next_row(seq: Sequence, length: int, page_size: int) -> ScheduledSequence:
    """The next `length` positions, with whatever the device needs for them and does not have."""
    start = seq.num_scheduled_tokens
    end = start + length
    first = min(start, seq.uploaded_len) if start < seq.upload_end else start
    scored = seq.scored and seq.reported_len < seq.prompt_len
    return ScheduledSequence(
        seq.id,
        seq.row,
        start,
        length,
        length == seq.pending,
        suppress_ends=end - seq.prompt_len < seq.min_tokens,
        constrained=seq.constraint is not None,
        tokens=seq.tokens[first : min(end, seq.upload_end)].tobytes() if first < seq.upload_end else b"",
        new_pages=tuple(seq.pages[seq.num_mapped_pages : ceil_div(end, page_size)]),
        first_page=seq.num_mapped_pages,
        skipped=start - first,
        targets=seq.tokens[start + 1 : min(end + 1, seq.prompt_len)].tobytes() if scored else b"",
    )


def paged_row(seq: Sequence, page_size: int) -> ScheduledSequence:
    """The next row of a settled sequence, where it begins with a new page."""
    start, mapped = seq.num_scheduled_tokens, seq.num_mapped_pages
    pages = tuple(seq.pages[mapped : start // page_size + 1])
    constrained = seq.constraint is not None
    return ScheduledSequence(
        seq.id, seq.row, start, 1, True, constrained=constrained, new_pages=pages, first_page=mapped
    )


def steady_rows(running: Items[Sequence]) -> list[ScheduledSequence]:
    """Of settled sequences, those whose one pending position, at `launched`, lies in a page that the device knows."""
    return [
        ScheduledSequence(seq.id, seq.row, seq.num_scheduled_tokens, 1, True)
        for seq in running
        if seq.num_scheduled_tokens < seq.next_page_boundary
    ]


def steady_rows_some_constrained(running: Items[Sequence]) -> list[ScheduledSequence]:
    """The same where some follow a grammar: a second loop, so that the first need not look."""
    return [
        ScheduledSequence(seq.id, seq.row, seq.num_scheduled_tokens, 1, True, False, seq.constraint is not None)
        for seq in running
        if seq.num_scheduled_tokens < seq.next_page_boundary
    ]


def new_sequence(seq: Sequence) -> NewSequence:
    """What goes before its first row."""
    return NewSequence(
        seq.id,
        seq.row,
        seq.prompt_len,
        seq.params,
        tuple(seq.end_ids) if seq.min_tokens else (),
    )


def limit_uploads(candidates: Items[Sequence], takes: list[int], left: int) -> None:
    """Puts off rows whose cached tokens would not fit into the step's upload. The first always fits."""
    for index, seq in enumerate(candidates):
        if takes[index] and seq.num_scheduled_tokens > seq.uploaded_len and not seq.in_steady_decode:
            skipped = seq.num_scheduled_tokens - seq.uploaded_len
            if skipped > left:
                takes[index] = 0
            else:
                left -= skipped


class Planner:
    """Makes plans over the running sequences.

    Length caps are foreseen: samples in flight count. An end of sequence cannot be, hence zombies. Written out for
    speed: this runs for every row of every step.
    """

    def __init__(
        self, memory: KVManager, limits: SchedulerLimits, policy: Policy, preempt: Callable[[Sequence], None]
    ) -> None:
        """preempt: takes a sequence out of the running ones."""
        self.memory = memory
        self.limits = limits
        self.policy = policy
        self._reserver = PageReserver(memory, preempt)
        self.budget = Budget(limits.max_step_tokens, limits.prefill_chunk, limits.prompts_a_step)

    @property
    def out_of_pages(self) -> bool:
        """Whether a row of the last step planned found no page."""
        return self._reserver.out_of_pages

    def plan(
        self,
        step_id: int,
        running: Running,
        held: Collection[Sequence],
        newest_step: int,
    ) -> StepPlan | None:
        """held: all that have pages; newest_step: launched last."""
        members, constrained = running.members, bool(running.constrained)
        if not running.unsteady and len(members) <= self.limits.max_step_tokens:
            rows, updated_rows = self._steady(members, constrained)
            if updated_rows is not None:
                masked = constrained and any(row.constrained for row in rows)
                plan = StepPlan(step_id, rows, (), len(rows), masked, not masked, True, running.logprobs, updated_rows)
                return plan if rows else None
        for seq_id in running.unsteady:
            seq = members[seq_id]
            if seq.num_scheduled_tokens < seq.upload_end:
                self.memory.extend(seq, newest_step)
        candidates, takes = self._choose(members, held)
        page_size = self.memory.page_size
        rows = tuple(
            [
                ScheduledSequence(seq.id, seq.row, seq.num_scheduled_tokens, 1, True, False, seq.constraint is not None)
                if seq.in_steady_decode and seq.num_scheduled_tokens < seq.next_page_boundary
                else next_row(seq, take, page_size)
                for seq, take in zip(candidates, takes, strict=True)
                if take
            ]
        )
        if not rows:
            return None
        new = [seq for seq, take in zip(candidates, takes, strict=True) if take and not seq.uploaded_len]
        return StepPlan.of(step_id, rows, tuple([new_sequence(seq) for seq in new]), running.logprobs)

    def _choose(self, running: dict[int, Sequence], held: Collection[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Who could compute, and how many positions each one takes."""
        candidates = [seq for seq in running.values() if len(seq.tokens) + seq.num_inflight_samples < seq.total_len]
        self._reserver.out_of_pages = False
        while True:
            wants = Wants(
                [len(seq.tokens) + seq.num_inflight_samples - seq.num_scheduled_tokens for seq in candidates],
                [seq.steps_skipped for seq in candidates],
                [seq.priority for seq in candidates],
            )
            takes = choose_rows(POLICIES[self.policy], wants, self.budget)
            limit_uploads(candidates, takes, self.limits.max_uploads)
            chosen = list(takes)
            self._reserver.reserve(candidates, takes, running, held)
            if any(takes) or not any(chosen):
                return candidates, takes
            # None of those that the policy prefers found a page, and the others must not wait for them: only what is
            # launched gives pages back.
            candidates = [seq for seq, take in zip(candidates, chosen, strict=True) if not take and seq.id in running]

    def _steady(
        self, running: dict[int, Sequence], constrained: bool
    ) -> tuple[tuple[ScheduledSequence, ...], tuple[ScheduledSequence, ...] | None]:
        """All rows, and those of them that bring pages, where there is nothing to choose: every sequence is settled, so
        each has one position pending, at `launched`, and the budget serves all. None if a page is not to be had."""
        sequences = list(running.values())
        rows = steady_rows_some_constrained(sequences) if constrained else steady_rows(sequences)
        updated_rows: tuple[ScheduledSequence, ...] = ()
        if len(rows) < len(running):
            at_edge = [
                seq for seq in sequences if seq.next_page_boundary <= seq.num_scheduled_tokens < seq.total_len - 1
            ]
            if not self.memory.grow_each(at_edge):
                return (), None
            page_size = self.memory.page_size
            updated_rows = tuple([paged_row(seq, page_size) for seq in at_edge])
        self._reserver.out_of_pages = False
        return (*rows, *updated_rows), updated_rows
