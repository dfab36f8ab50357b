"""Masks of constrained rows, as the runtime asks for them."""

from collections.abc import Sequence
from typing import Protocol

from tandem.engine_core.contracts import Constraint
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.staging import Ints


class MaskFiller(Protocol):
    """Computation of masks from the constraints that its own package makes."""

    def allocate(self, rows: int, words: int) -> Ints | None:
        """Return memory for masks, [rows, words] int32, zeroed; None if any will do."""

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Write the tokens that each constraint allows into its row of `out`.

        masks: each constraint with its row of `out`; out: [rows, ceil(V / 32)] int32, contiguous, of `allocate` if that
        gave any; bit i % 32 of word i // 32 stands for token i. Bits beyond the vocabulary do not matter.
        """


def mask_indices(plan: StepPlan) -> dict[int, int]:
    """Return the mask index of each constrained row that samples.

    The keys are the rows' numbers in the device's tables.

    Index 0 is the mask that allows everything; the others follow in the plan's order.
    """
    rows = [row.row for row in plan.rows if row.constrained and row.samples]
    return {row: index for index, row in enumerate(rows, start=1)}
