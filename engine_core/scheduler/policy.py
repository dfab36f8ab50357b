"""Scheduling policies, as pure functions of numbers.

A policy decides how many positions each row computes in the next step.

The positions of prompts in a step are limited (`Budget`), so that no stream waits long for them. The first prompt in
the policy's order gets at least three quarters of them, because prompts that share a step evenly all finish late. The
shortest of the others get up to a quarter (the shortest remaining time first, as in Schrage, 1968): a prompt that fits
the quarter, and that no shorter one fills, is in the next step however long the first one is. Prompts of different
priority never share in this way.

Under every policy a row that could compute is served at least once in `MAX_STEPS_SKIPPED` planned steps: a row that was
skipped that often comes first. Overdue prompts share the step. Where a step takes at most K prompts, has room for only
K positions of prompts, or takes only whole ones, overdue prompts are served K, or one, in each step, the longest
waiting first.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from msgspec import Struct

from tandem.protocol.engine_options import Policy

MAX_STEPS_SKIPPED = 16
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
    prompt_tokens: int = 0
    """Largest number of positions of all prompts together; 0: limited by `tokens` alone. Whole prompts ignore it."""
    others_decode: bool = False
    """True if the step also has decode rows that the policy does not see."""


class RowDemand(Struct, frozen=True):
    """Rows that could compute, in columns, in the order of their admission."""

    pending: Sequence[int]
    """Positions that each row could compute: 1 for a row that decodes, more for a prompt."""
    steps_skipped: Sequence[int]
    """Number of steps without each row since the last one with it."""
    priority: Sequence[int]
    """Priority of each row; higher comes first under the `priority` policy."""
    starts: Sequence[int] = ()
    """First position that each row could compute; only with a grid."""
    grid: int = 0
    """A row that does not compute all it could ends at a multiple of this if that costs it at most a quarter of its
    positions; 0: anywhere."""

    def aligned(self, index: int, length: int) -> int:
        """Return the positions of a row that may compute `length`, with its end on the grid.

        They are `length` if less than three quarters of it would be left: an end off the grid costs the kernels part of
        a piece, but steps with room for 63 or 127 positions would compute only half of them.
        """
        if not self.grid or length >= self.pending[index]:
            return length
        start = self.starts[index]
        aligned = (start + length) // self.grid * self.grid - start
        return aligned if 4 * aligned >= 3 * length else length


class StepDraft:
    """A step to which a policy gives positions."""

    def __init__(self, demand: RowDemand, budget: Budget) -> None:
        self.demand = demand
        self.left = budget.tokens
        self.prompts_left = budget.prompts or len(demand.pending)
        self.lengths = [0] * len(demand.pending)
        self.decoding = [index for index, pending in enumerate(demand.pending) if pending == 1]
        self.prompts = [index for index, pending in enumerate(demand.pending) if pending > 1]
        # Where no row decodes, none waits for a long chunk.
        self.chunk = budget.chunk if self.decoding or budget.others_decode else budget.chunk and budget.tokens
        self._prompt_left = (budget.chunk and budget.prompt_tokens) or budget.tokens

    @property
    def prompt_room(self) -> int:
        """Positions that prompts may still take."""
        return min(self.left, self._prompt_left)

    def serve(self, rows: Iterable[int], share: int = 0) -> None:
        """Give rows the positions they could compute, in this order, while there is room.

        share: largest number of positions for each prompt; 0: not limited.
        """
        closed = False
        for index in rows:
            if self.left <= 0:
                return
            if self.demand.pending[index] > 1:
                if not closed and not self._extend(index, share or self.left):
                    # A whole prompt that does not fit is not overtaken by a shorter one.
                    closed = not self.chunk or not self.prompt_room
            elif not self.lengths[index]:
                self.lengths[index] = 1
                self.left -= 1

    def serve_prompts(self, prompts: Sequence[int]) -> None:
        """Give the first prompt three quarters of the room for prompts.

        The shortest others get a quarter, and the remainder goes to all in order.

        If prompts run whole or one per step, they are served in order.
        """
        waiting = [index for index in prompts if not self.lengths[index]]
        if self.chunk and len(waiting) > 1 and self.prompts_left > 1:
            share = self.prompt_room // 4
            self.prompts_left -= 1  # Reserved for the first prompt.
            for index in sorted(waiting[1:], key=self.demand.pending.__getitem__):
                if not share:
                    break
                share -= self._extend(index, share)
            self.prompts_left += 1
        self.serve(prompts)

    def _extend(self, index: int, limit: int) -> int:
        """Give a prompt up to `limit` further positions; return their number.

        It gets all remaining positions or none if prompts run whole.
        """
        served, room = self.lengths[index], self.prompt_room
        wanted = self.demand.pending[index] - served
        if self.chunk:
            wanted = min(wanted, self.chunk - served, limit, room)
            if self.demand.grid:
                wanted = self.demand.aligned(index, served + wanted) - served
        if not 0 < wanted <= room or not (served or self.prompts_left):
            return 0
        self.prompts_left -= not served
        self.lengths[index] += wanted
        self.left -= wanted
        self._prompt_left -= wanted
        return wanted

    def serve_overdue(self) -> None:
        """Serve the rows that were skipped for too long, the longest first."""
        steps_skipped = self.demand.steps_skipped
        overdue = [index for index in range(len(steps_skipped)) if steps_skipped[index] >= MAX_STEPS_SKIPPED - 1]
        if not overdue:
            return
        overdue.sort(key=lambda index: -steps_skipped[index])
        prompts = [index for index in overdue if self.demand.pending[index] > 1]
        self.serve([index for index in overdue if self.demand.pending[index] == 1])
        sharing = min(len(prompts), self.prompts_left)
        self.serve(prompts, max(1, self.prompt_room // sharing) if sharing else 0)


PolicyRule = Callable[[StepDraft], None]


def fcfs(step: StepDraft) -> None:
    """Serve decoding rows, then prompts in order.

    No decoding row waits behind a prompt.
    """
    step.serve(step.decoding)
    step.serve_prompts(step.prompts)


def prefill_first(step: StepDraft) -> None:
    """Serve prompts, so that first tokens come early.

    Decoding rows get the remaining positions.
    """
    step.serve_prompts(step.prompts)
    step.serve(step.decoding)


def decode_first(step: StepDraft) -> None:
    """Serve decoding rows; prompts run rarely, but all together.

    So most steps hold no prompt.
    """
    step.serve(step.decoding)
    steps_skipped = step.demand.steps_skipped
    if not step.decoding or any(steps_skipped[index] >= DECODE_RUN for index in step.prompts):
        step.serve_prompts(step.prompts)


def decode_round_robin(step: StepDraft) -> None:
    """Give prompts up to half of the step, and decoding rows turns in the rest."""
    steps_skipped = step.demand.steps_skipped
    kept = step.left - step.left // 2 if step.decoding else 0
    step.left -= kept
    step.serve_prompts(step.prompts)
    step.left += kept
    step.serve(sorted(step.decoding, key=lambda index: -steps_skipped[index]))
    step.serve(step.prompts)


def by_priority(step: StepDraft) -> None:
    """Serve the highest priority first, whether prompt or decoding.

    Equal priorities are served as in `fcfs`.
    """
    priority = step.demand.priority
    order = sorted((*step.decoding, *step.prompts), key=lambda index: -priority[index])
    for _, equals in groupby(order, key=priority.__getitem__):
        rows = list(equals)
        step.serve([index for index in rows if step.demand.pending[index] == 1])
        step.serve_prompts([index for index in rows if step.demand.pending[index] > 1])


POLICIES: dict[Policy, PolicyRule] = {
    "fcfs": fcfs,
    "prefill_first": prefill_first,
    "decode_first": decode_first,
    "decode_round_robin": decode_round_robin,
    "priority": by_priority,
}


def choose_rows(policy: PolicyRule, demand: RowDemand, budget: Budget) -> list[int]:
    """Return the number of positions that each row computes.

    The list is in the order of the rows; 0 for a row that the step leaves out.
    """
    pending = demand.pending
    if pending and len(pending) <= budget.tokens and min(pending) == max(pending) == 1:
        return list(pending)
    step = StepDraft(demand, budget)
    step.serve_overdue()
    policy(step)
    return step.lengths
