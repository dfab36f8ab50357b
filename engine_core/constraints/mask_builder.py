"""Many matchers at once: tokens accepted, and masks filled, by several threads where that is quicker.

Copies of one compiled grammar share a lock, so threads only get in each other's way there: 64 masks of one grammar took
0.6 ms on one thread and 1.1 ms on eight, 256 masks of as many grammars 3.6 ms and 1.2 ms. Accepting a token is too
little work to be handed over at all.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.contracts import Constraint
from tandem.protocol.stats import EngineStats

Ints = NDArray[np.int32]

PARALLEL_GRAMMARS = 8
"""From so many different grammars in a step on, other threads help."""


class MaskBuilder:
    """Fills the masks of the constraints that this package makes, and of no others."""

    def __init__(
        self, executor: LLExecutor | None, end_ids: Sequence[int], stats: EngineStats, clock: Callable[[], float]
    ) -> None:
        """executor: threads beside the loop's, None for none; clock: seconds, for the time that masks take."""
        self.executor = executor
        self._end_words = np.array(end_ids, dtype=np.int64) // 32
        self._end_bits = np.int32(1) << (np.array(end_ids, dtype=np.int32) % 32)
        self.stats = stats
        self.clock = clock

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Writes the mask of each constraint into the row of `out` that is named beside it.

        out: [rows, ceil(V / 32)] int32, contiguous; bit i % 32 of word i // 32 stands for token i. A matcher that has
        failed allows the end ids alone, and `accept` refuses them.
        """
        start = self.clock()
        pairs = cast("Sequence[tuple[GrammarConstraint, int]]", masks)
        assert out.flags.c_contiguous and out.dtype == np.int32, f"{out.dtype} of strides {out.strides} for masks"
        address, size = out.ctypes.data, out.strides[0]
        grammars = {id(constraint.compiled_grammar) for constraint, _ in pairs}
        if self.executor is None or len(grammars) < PARALLEL_GRAMMARS:
            for constraint, place in pairs:
                assert 0 <= place < len(out), f"mask {place} of {len(out)}"
                constraint.matcher.unsafe_compute_mask_ptr(address + place * size, size)
        else:
            wanted = [(constraint.matcher, place) for constraint, place in pairs]
            self.executor.unsafe_compute_mask_ptr(wanted, address, size, len(out))
        endless = [place for constraint, place in pairs if constraint.ignore_ends]
        if endless:
            self._drop_ends(endless, out)
        self.stats.mask_rows += len(pairs)
        self.stats.mask_seconds += self.clock() - start

    def _drop_ends(self, places: list[int], out: Ints) -> None:
        """Takes the end ids out of these masks, unless nothing would be left: then the grammar has come to its end."""
        # Most masks of a step hold no end id, and one look at a few words of all of them is cheap.
        rows = np.array(places)
        may_end = (out[rows[:, None], self._end_words] & self._end_bits).any(axis=1)
        for mask in (out[place] for place in rows[may_end]):
            kept = mask.copy()
            np.bitwise_and.at(kept, self._end_words, ~self._end_bits)
            if kept.any():
                mask[:] = kept
