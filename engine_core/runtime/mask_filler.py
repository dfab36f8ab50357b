"""Masking as the runtime asks for it: from constraints to bits."""

from collections.abc import Sequence
from typing import Protocol

from tandem.engine_core.contracts import Constraint
from tandem.engine_core.runtime.staging import Ints


class MaskFiller(Protocol):
    """Knows the constraints of a step from the inside."""

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Writes what each constraint allows into the row of `out` that is named beside it.

        out: [rows, ceil(V / 32)] int32, contiguous; bit i % 32 of word i // 32 stands for token i. What is beyond the
        vocabulary does not matter.
        """
