"""Scheduling policies, as pure functions of numbers.

A policy says how many positions each row computes in the next step.

Under every policy a row that could compute is served at least once in `PATIENCE` planned steps: a row that was skipped
that often comes first. Overdue prompts share the step. Where a step takes at most K prompts, or only whole ones,
overdue prompts are served K, or one, in each step, the longest waiting first.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tandem.protocol.engine_options import Policy

PATIENCE = 16
"""Planned steps within which every row that could compute is served."""
DECODE_RUN = 4
"""Consecutive steps without a prompt under `decode_first` while rows decode and prompts wait."""


class Budget(Struct, frozen=True):
    """Limits of one step."""

    tokens: int
    """Largest number of positions in all; at least the number of rows."""
    chunk: int
    """Largest number of positions of one prompt in a step that also decodes; 0: prompts run whole or not at all."""
    prompts: int = 0
    """Largest number of prompts; 0: any number."""


class RowDemand(Struct, frozen=True):
    """Rows that could compute, in columns, in the order of their admission."""

    pending: Sequence[int]
    """Positions that each row could compute: 1 for a row that decodes, more for a prompt."""
    steps_skipped: Sequence[int]
    """Number of steps without each row since the last one with it."""
    priority: Sequence[int]
    """Priority of each row; higher comes first under the `priority` policy."""


class StepDraft:
    """A step to which a policy gives positions."""

    def __init__(self, demand: RowDemand, budget: Budget) -> None:
        self.demand = demand
        self.chunk = budget.chunk
        self.left = budget.tokens
        self.prompts_left = budget.prompts or len(demand.pending)
        self.lengths = [0] * len(demand.pending)
        self.decoding = [index for index, pending in enumerate(demand.pending) if pending == 1]
        self.prompts = [index for index, pending in enumerate(demand.pending) if pending > 1]
        if self.chunk and not self.decoding:
            # No decoding row waits for this step. Prompts that fit a chunk do not wait behind longer ones; the longer
            # ones take what is left one after the other, because sharing the step gives neither its first token sooner.
            self.prompts.sort(key=lambda index: demand.pending[index] > budget.chunk)
            self.chunk = budget.tokens

    def serve(self, rows: Iterable[int], share: int = 0) -> None:
        """Give rows the positions they could compute, in this order, while there is room.

        share: largest number of positions for each prompt; 0: not limited.
        """
        closed = False
        for index in rows:
            if self.left <= 0:
                return
            wanted = self.demand.pending[index]
            if self.lengths[index]:
                continue
            if wanted > 1:
                if self.chunk:
                    wanted = min(wanted, self.chunk, self.left, share or wanted)
                # A whole prompt that does not fit is not overtaken by a shorter one.
                closed = closed or not self.prompts_left or wanted > self.left
                if closed:
                    continue
                self.prompts_left -= 1
            self.lengths[index] = wanted
            self.left -= wanted

    def serve_overdue(self) -> None:
        """Serve the rows that were skipped for too long, the longest first."""
        steps_skipped = self.demand.steps_skipped
        overdue = [index for index in range(len(steps_skipped)) if steps_skipped[index] >= PATIENCE - 1]
        if not overdue:
            return
        overdue.sort(key=lambda index: -steps_skipped[index])
        prompts = [index for index in overdue if self.demand.pending[index] > 1]
        self.serve([index for index in overdue if self.demand.pending[index] == 1])
        sharing = min(len(prompts), self.prompts_left)
        self.serve(prompts, max(1, self.left // sharing) if sharing else 0)


PolicyRule = Callable[[StepDraft], None]


def fcfs(step: StepDraft) -> None:
    """Serve decoding rows, then prompts in order.

    No decoding row waits behind a prompt.
    """
    step.serve(step.decoding)
    step.serve(step.prompts)


def prefill_first(step: StepDraft) -> None:
    """Serve prompts, so that first tokens come early.

    Decoding rows take what is left.
    """
    step.serve(step.prompts)
    step.serve(step.decoding)


def decode_first(step: StepDraft) -> None:
    """Serve decoding rows; prompts run rarely, but all together.

    So most steps hold no prompt.
    """
    step.serve(step.decoding)
    steps_skipped = step.demand.steps_skipped
    if not step.decoding or any(steps_skipped[index] >= DECODE_RUN for index in step.prompts):
        step.serve(step.prompts)


def decode_round_robin(step: StepDraft) -> None:
    """Give prompts up to half of the step, and decoding rows turns in the rest."""
    steps_skipped = step.demand.steps_skipped
    kept = step.left - step.left // 2 if step.decoding else 0
    step.left -= kept
    step.serve(step.prompts)
    step.left += kept
    step.serve(sorted(step.decoding, key=lambda index: -steps_skipped[index]))
    step.serve(step.prompts)


def by_priority(step: StepDraft) -> None:
    """Serve the highest priority first, whether prompt or decoding.

    Among equals the order is that of `fcfs`.
    """
    priority = step.demand.priority
    step.serve(sorted((*step.decoding, *step.prompts), key=lambda index: -priority[index]))


POLICIES: dict[Policy, PolicyRule] = {
    "fcfs": fcfs,
    "prefill_first": prefill_first,
    "decode_first": decode_first,
    "decode_round_robin": decode_round_robin,
    "priority": by_priority,
}


def choose_rows(policy: PolicyRule, demand: RowDemand, budget: Budget) -> list[int]:
    """Return the number of positions that each row computes.

    The list is in the order of the rows; 0 for a row without a place in the step.
    """
    pending = demand.pending
    if pending and len(pending) <= budget.tokens and min(pending) == max(pending) == 1:
        return list(pending)
    step = StepDraft(demand, budget)
    step.serve_overdue()
    policy(step)
    return step.lengths
