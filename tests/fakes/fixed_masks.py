"""Recorded masks, so that a step can be sampled again after its constraints have advanced."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.engine_core.contracts import Constraint, MaskedRows
from tandem.engine_core.runtime.masks import MaskFiller, mask_indices
from tandem.engine_core.runtime.slots import StepSlot
from tests.fakes.constraint import FakeConstraint


class FixedMask(FakeConstraint):
    """Constraint that always allows what it allowed when it was recorded."""

    def __init__(self, words: NDArray[np.int32]) -> None:
        super().__init__("fixed")
        self.words = words


class ReplayingFiller:
    """Writes recorded masks as they are, and has another filler write the others."""

    def __init__(self, inner: MaskFiller) -> None:
        self.inner = inner

    def allocate(self, rows: int, words: int) -> NDArray[np.int32] | None:
        return self.inner.allocate(rows, words)

    def prefetch(self, masks: Sequence[tuple[Constraint, int]], out: NDArray[np.int32]) -> None:
        self.inner.prefetch(
            [(constraint, index) for constraint, index in masks if not isinstance(constraint, FixedMask)], out
        )

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: NDArray[np.int32]) -> None:
        for constraint, index in masks:
            if isinstance(constraint, FixedMask):
                out[index] = constraint.words
            else:
                self.inner.fill([(constraint, index)], out)


def as_filled(slot: StepSlot, masks: MaskedRows | None) -> MaskedRows | None:
    """Return the masks of a step that has just been sampled, as recorded masks, including those of ended rows."""
    if masks is None:
        return None
    assert slot.plan is not None
    return [(row, FixedMask(slot.masks_view[index].copy())) for row, index in mask_indices(slot.plan).items()]
