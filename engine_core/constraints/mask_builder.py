"""Token masks of many constraints at once, built on several threads.

Copies of one compiled grammar share a lock, so threads only contend there: 64 masks of one grammar took 0.6 ms on one
thread and 1.1 ms on eight, 256 masks of as many grammars 3.6 ms and 1.2 ms.
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
"""Smallest number of different grammars in a step for which other threads are used."""


class MaskBuilder:
    """Implement `runtime.masks.MaskFiller` for `GrammarConstraint`s only."""

    def __init__(
        self, executor: LLExecutor | None, end_ids: Sequence[int], stats: EngineStats, clock: Callable[[], float]
    ) -> None:
        """Keep the threads, and the end ids as words and bits of a mask.

        executor: threads besides the loop's, or None; end_ids: ids that end a sequence; clock: seconds, for the time
        that masks take.
        """
        self.executor = executor
        self._end_words = np.array(end_ids, dtype=np.int64) // 32
        self._end_bits = np.int32(1) << (np.array(end_ids, dtype=np.int32) % 32)
        self.stats = stats
        self.clock = clock

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Implement `runtime.masks.MaskFiller.fill` with the constraints' matchers.

        A matcher that has failed allows the end ids only, and `accept` rejects them.
        """
        start = self.clock()
        pairs = cast("Sequence[tuple[GrammarConstraint, int]]", masks)
        assert out.flags.c_contiguous and out.dtype == np.int32, f"{out.dtype} of strides {out.strides} for masks"
        address, size = out.ctypes.data, out.strides[0]
        grammars = {id(constraint.compiled_grammar) for constraint, _ in pairs}
        if self.executor is None or len(grammars) < PARALLEL_GRAMMARS:
            for constraint, index in pairs:
                assert 0 <= index < len(out), f"mask {index} of {len(out)}"
                constraint.matcher.unsafe_compute_mask_ptr(address + index * size, size)
        else:
            wanted = [(constraint.matcher, index) for constraint, index in pairs]
            self.executor.unsafe_compute_mask_ptr(wanted, address, size, len(out))
        endless = [index for constraint, index in pairs if constraint.ignore_ends]
        if endless:
            self._drop_ends(endless, out)
        self.stats.mask_rows += len(pairs)
        self.stats.mask_seconds += self.clock() - start

    def _drop_ends(self, indices: list[int], out: Ints) -> None:
        """Clear the end ids in these masks, unless nothing would remain.

        A grammar whose mask holds only end ids has come to its end.
        """
        # Most masks of a step hold no end id, and testing a few words of all of them at once is cheap.
        rows = np.array(indices)
        may_end = (out[rows[:, None], self._end_words] & self._end_bits).any(axis=1)
        for mask in (out[index] for index in rows[may_end]):
            kept = mask.copy()
            np.bitwise_and.at(kept, self._end_words, ~self._end_bits)
            if kept.any():
                mask[:] = kept
