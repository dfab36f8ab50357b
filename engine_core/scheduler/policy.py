"""Who computes how much in the next step: pure functions of numbers.

Whatever the policy, a row that could compute is served at least once in `PATIENCE` planned steps: one that was passed
over so often comes first. Prompts that come first share the step. Where a step takes K prompts at most, or none but
whole ones, the prompts that came first that late are served K, or one, a step, the longest waiting first.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tandem.protocol.engine_options import Policy as PolicyName

PATIENCE = 16
DECODE_RUN = 4
"""Under `decode_first`, steps without a prompt while rows decode and prompts wait."""


class Budget(Struct, frozen=True):
    """What one step may compute."""

    tokens: int
    """Positions in all; at least one for each row there can be."""
    chunk: int
    """Positions of one prompt beside a decoding row; 0: every prompt at once or not in this step."""
    prompts: int = 0
    """Prompts; 0: any number."""


class RowDemand(Struct, frozen=True):
    """The rows that could compute, in the order of their admission, in columns."""

    pending: Sequence[int]
    """Positions: 1 for a row that decodes, more for a prompt."""
    passed: Sequence[int]
    """Steps since its last one that had no place for it."""
    priority: Sequence[int]


class Step:
    """A step being filled."""

    def __init__(self, demand: RowDemand, budget: Budget) -> None:
        self.demand = demand
        self.chunk = budget.chunk
        self.left = budget.tokens
        self.prompts_left = budget.prompts or len(demand.pending)
        self.takes = [0] * len(demand.pending)
        self.decoding = [index for index, pending in enumerate(demand.pending) if pending == 1]
        self.prompts = [index for index, pending in enumerate(demand.pending) if pending > 1]
        if self.chunk and not self.decoding:
            # No stream waits for this step. Prompts that a chunk would end do not wait for the rest of longer ones;
            # those take what is left one after the other, for of two that share the step none has its token sooner.
            self.prompts.sort(key=lambda index: demand.pending[index] > budget.chunk)
            self.chunk = budget.tokens

    def serve(self, rows: Iterable[int], share: int = 0) -> None:
        """Gives rows what they want, in this order, while there is room. share: at most so much to each prompt."""
        closed = False
        for index in rows:
            if self.left <= 0:
                return
            wanted = self.demand.pending[index]
            if self.takes[index]:
                continue
            if wanted > 1:
                if self.chunk:
                    wanted = min(wanted, self.chunk, self.left, share or wanted)
                # A whole prompt that has to wait is not overtaken by a shorter one.
                closed = closed or not self.prompts_left or wanted > self.left
                if closed:
                    continue
                self.prompts_left -= 1
            self.takes[index] = wanted
            self.left -= wanted

    def serve_overdue(self) -> None:
        """Rows that were passed over for too long, longest first."""
        passed = self.demand.passed
        overdue = [index for index in range(len(passed)) if passed[index] >= PATIENCE - 1]
        if not overdue:
            return
        overdue.sort(key=lambda index: -passed[index])
        prompts = [index for index in overdue if self.demand.pending[index] > 1]
        self.serve([index for index in overdue if self.demand.pending[index] == 1])
        sharing = min(len(prompts), self.prompts_left)
        self.serve(prompts, max(1, self.left // sharing) if sharing else 0)


Policy = Callable[[Step], None]


def fcfs(step: Step) -> None:
    """Decoding rows, so that no stream waits behind a prompt; then prompts in order."""
    step.serve(step.decoding)
    step.serve(step.prompts)


def prefill_first(step: Step) -> None:
    """Prompts, so that first tokens come early; decoding rows take what is left."""
    step.serve(step.prompts)
    step.serve(step.decoding)


def decode_first(step: Step) -> None:
    """Decoding rows; prompts run only now and then, but all together, so that most steps hold none."""
    step.serve(step.decoding)
    passed = step.demand.passed
    if not step.decoding or any(passed[index] >= DECODE_RUN for index in step.prompts):
        step.serve(step.prompts)


def decode_round_robin(step: Step) -> None:
    """Half of the step to prompts if they want it, and the decoding rows take turns in what is left."""
    passed = step.demand.passed
    kept = step.left - step.left // 2 if step.decoding else 0
    step.left -= kept
    step.serve(step.prompts)
    step.left += kept
    step.serve(sorted(step.decoding, key=lambda index: -passed[index]))
    step.serve(step.prompts)


def by_priority(step: Step) -> None:
    """The highest priority first, whether prompt or decoding; among equals as in `fcfs`."""
    priority = step.demand.priority
    step.serve(sorted((*step.decoding, *step.prompts), key=lambda index: -priority[index]))


POLICIES: dict[PolicyName, Policy] = {
    "fcfs": fcfs,
    "prefill_first": prefill_first,
    "decode_first": decode_first,
    "decode_round_robin": decode_round_robin,
    "priority": by_priority,
}


def choose_rows(policy: Policy, demand: RowDemand, budget: Budget) -> list[int]:
    """How many positions each row takes, 0 for none, in the rows' order."""
    pending = demand.pending
    if pending and len(pending) <= budget.tokens and min(pending) == max(pending) == 1:
        return list(pending)
    step = Step(demand, budget)
    step.serve_overdue()
    policy(step)
    return step.takes
