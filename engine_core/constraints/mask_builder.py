"""Token masks of many constraints at once, built on several threads.

A mask holds the lock of its base (`grammars.GrammarBase`) for the whole of its computation, so threads gain nothing
where all rows of a step are of one base: 64 masks of one took 0.6 ms on one thread and 1.1 ms on eight, 256 masks of as
many 3.6 ms and 1.2 ms. Whether they gain anything otherwise depends on cores that others use too, so it is measured.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from tandem.engine_core.constraints.faster_way import FasterWay
from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.mask_budget import FREE_SECONDS, MaskBudget
from tandem.engine_core.constraints.threads import Group, by_base, fitting
from tandem.engine_core.contracts import Constraint
from tandem.protocol.stats import EngineStats

Ints = NDArray[np.int32]
Pairs = Sequence[tuple[GrammarConstraint, int]]
"""Constraints, each with the index of its mask."""

SLOW_SECONDS = 0.01
"""Time of masks computed on several threads, whose own times are unknown, from which some are measured in later steps.
Those of 256 ordinary grammars take a few milliseconds."""
MEASURED_MASKS, MEASURED_AT_ONCE = 16, 8
"""Number of masks of a constraint that are measured after a slow step, and of constraints in one step."""
EVERYTHING = np.int32(-1)
"""Word of a mask that allows all its tokens."""


class MaskBuilder:
    """Implement `runtime.masks.MaskFiller` for `GrammarConstraint`s only."""

    def __init__(
        self,
        executors: Mapping[int, LLExecutor],
        end_ids: Sequence[int],
        stats: EngineStats,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Keep the threads, and the end ids as words and bits of a mask.

        executors: threads besides the loop's, by their number, the fewest first; end_ids: ids that end a sequence;
        clock: seconds, for the time that masks take; cpu_clock: CPU time in seconds of the calling thread.
        """
        self.executors = executors
        # Several end ids may share a word.
        self._end_words = np.unique(np.array(end_ids, dtype=np.int64) // 32)
        self._end_bits = np.zeros(len(self._end_words), dtype=np.int32)
        for token in end_ids:
            self._end_bits[self._end_words == token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        self.stats = stats
        self.clock = clock
        self.cpu_clock = cpu_clock
        self._budget = MaskBudget(clock)
        self._threads_help = FasterWay()

    def fill(self, masks: Sequence[tuple[Constraint, int]], out: Ints) -> None:
        """Implement `runtime.masks.MaskFiller.fill` with the constraints' matchers.

        A matcher that has failed allows the end ids only, and one whose masks took too long everything; `accept`
        rejects what either allows.
        """
        start = self.clock()
        pairs = cast("Pairs", masks)
        assert out.flags.c_contiguous and out.dtype == np.int32, f"{out.dtype} of strides {out.strides} for masks"
        groups = by_base(pairs) if self.executors else ()
        executor = fitting(self.executors, groups)
        if executor is None:
            self._compute_measured(pairs, out)
        elif not self._threads_help.choose():
            self._compute_measured(pairs, out)
            self._threads_help.record(False, self.clock() - start, len(pairs))
        elif self._compute_parallel(executor, groups, out):
            self._threads_help.record(True, self.clock() - start, len(pairs))
        endless = [index for constraint, index in pairs if constraint.ignore_ends]
        if endless:
            self._drop_ends(endless, out)
        self.stats.mask_rows += len(pairs)
        self.stats.mask_seconds += self.clock() - start

    def _compute_measured(self, pairs: Pairs, out: Ints) -> None:
        """Compute masks on the calling thread, and charge their CPU time.

        Constraints that have spent their budget get a mask at no cost.
        """
        address, size, clock = out.ctypes.data, out.strides[0], self.clock
        cpu, since, others = self.cpu_clock(), clock(), 0.0
        for constraint, index in pairs:
            assert 0 <= index < len(out), f"mask {index} of {len(out)}"
            cost = constraint.cost
            if cost.debt or constraint.overdrawn:
                if self._is_overdrawn(constraint, index, out):
                    continue
                cpu, since, others = self.cpu_clock(), clock(), 0.0
            if cost.unmeasured:
                cost.unmeasured -= 1
            constraint.matcher.unsafe_compute_mask_ptr(address + index * size, size)
            now = clock()
            took, since = now - since, now
            # The clock of CPU time is a system call. As a thread has no more CPU time than passes, most masks have
            # nothing to charge or to pay off by the other clock already.
            if cost.debt or took > FREE_SECONDS:
                used = self.cpu_clock()
                constraint.overdrawn = self._budget.charge(cost, max(0.0, used - cpu - others))
                cpu, since, others = used, clock(), 0.0
            else:
                others += took

    def _is_overdrawn(self, constraint: GrammarConstraint, index: int, out: Ints) -> bool:
        """Return whether a constraint has spent its budget.

        Such a constraint gets a mask that costs nothing.
        """
        constraint.overdrawn = constraint.overdrawn or self._budget.problem(constraint.cost)
        if constraint.overdrawn:
            out[index] = EVERYTHING
        return bool(constraint.overdrawn)

    def _compute_parallel(self, executor: LLExecutor, groups: Collection[Group], out: Ints) -> bool:
        """Compute masks on all threads, but a few on the calling one.

        These are of constraints that slow steps had: first those that took longest, then those that were measured
        least. Return whether there were none.
        """
        together: Group = []
        suspects: Group = []
        for group in groups:
            for pair in group:
                cost = pair[0].cost
                (suspects if cost.unmeasured or cost.debt else together).append(pair)
        suspects.sort(key=lambda pair: (pair[0].cost.debt, pair[0].cost.unmeasured), reverse=True)
        alone = suspects[:MEASURED_AT_ONCE]
        self._compute_measured(alone, out)
        together += [pair for pair in suspects[MEASURED_AT_ONCE:] if not self._is_overdrawn(*pair, out)]
        if not together:
            return False
        start = self.clock()
        wanted = [(constraint.matcher, index) for constraint, index in together]
        executor.unsafe_compute_mask_ptr(wanted, out.ctypes.data, out.strides[0], len(out))
        if self.clock() - start >= SLOW_SECONDS:
            for constraint, _ in together:
                constraint.cost.unmeasured = constraint.cost.unmeasured or MEASURED_MASKS
        return not alone

    def _drop_ends(self, indices: list[int], out: Ints) -> None:
        """Clear the end ids in these masks, unless nothing would remain.

        A grammar whose mask holds only end ids has come to its end.
        """
        # Most masks of a step hold no end id, and testing a few words of all of them at once is cheap.
        rows = np.array(indices)
        found = out[rows[:, None], self._end_words]
        may_end = (found & self._end_bits).any(axis=1)
        if not may_end.any():
            return
        rows, found = rows[may_end], found[may_end]
        out[rows[:, None], self._end_words] = found & ~self._end_bits
        for index, words in zip(rows.tolist(), found, strict=True):
            if not out[index].any():
                out[index, self._end_words] = words
