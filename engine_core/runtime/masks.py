"""Masks of constrained rows, as the runtime asks for them."""

from collections.abc import Sequence
from typing import Protocol

from tandem.engine_core.contracts import Constraint
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.staging import Ints


class MaskFiller(Protocol):
    """Computes masks from the constraints that its own package makes."""

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Write what each constraint allows into the row of `out` that is paired with it.

        out: [rows, ceil(V / 32)] int32, contiguous; bit i % 32 of word i // 32 stands for token i. Bits beyond the
        vocabulary do not matter.
        """


def mask_indices(plan: StepPlan) -> dict[int, int]:
    """Return the index of the mask of each constrained row that samples, by the row's number in the device's tables.

    Index 0 is the mask that allows everything; the others follow in the plan's order.
    """
    rows = [row.row for row in plan.rows if row.constrained and row.samples]
    return {row: index for index, row in enumerate(rows, start=1)}
