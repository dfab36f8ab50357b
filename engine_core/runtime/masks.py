"""Masks of constrained rows: their indices, and the interface that computes them."""

from collections.abc import Mapping
from typing import Protocol

from tandem.engine_core.contracts import IndexedMasks, InternedList, MaskedRows, cache_of
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.staging import Ints

_IN_ORDER = ("indexed", 0)
"""Cache key of masks that are indexed in their own order."""


class MaskFiller(Protocol):
    """Computes masks from constraints."""

    def allocate(self, rows: int, words: int) -> Ints | None:
        """Return memory for masks or for ids, [rows, words] int32, zeroed.

        None if any memory is suitable.
        """

    def prefetch(self, masks: IndexedMasks, out: Ints) -> None:
        """Start computing masks in worker processes, if any, for which `fill` will probably be called next.

        The caller overwrites masks for which `fill` is not called.
        """

    def fill(self, masks: IndexedMasks, out: Ints) -> None:
        """Write the tokens that each constraint allows into its row of `out`.

        masks: the same object that was passed to `prefetch` if they are equal, so that nothing has to be compared; out:
        [rows, ceil(V / 32)] int32, contiguous, returned by `allocate` unless it returned None; bit i % 32 of word i //
        32 is token i. Bits beyond the vocabulary do not matter.
        """


def mask_indices(plan: StepPlan) -> dict[int, int]:
    """Return the index of the mask of each constrained row that samples.

    Keys are row numbers of the device's tables; values are indices into the slot's masks on the host, in the plan's
    order. On the device index 0 is the mask that allows everything, so that indices are larger by one.
    """
    return {row: index for index, row in enumerate([row.row for row in plan.rows if row.constrained and row.samples])}


def index_masks(masks: MaskedRows, indices: Mapping[int, int]) -> IndexedMasks:
    """Return each constraint with the index of its mask.

    indices: result of `mask_indices`. If all masks are wanted, equal masks are the same object in all steps.
    """
    if len(masks) < len(indices):
        return [(constraint, indices[row]) for row, constraint in masks]
    cache = cache_of(masks)
    indexed: IndexedMasks | None = cache.get(_IN_ORDER)
    if indexed is None:
        indexed = cache[_IN_ORDER] = InternedList((constraint, index) for index, (_, constraint) in enumerate(masks))
    return indexed
