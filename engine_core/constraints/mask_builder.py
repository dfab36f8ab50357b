"""Token masks of many constraints, built by workers and on the loop's thread."""

import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.mask_budget import FREE_SECONDS, MaskBudget
from tandem.engine_core.constraints.workers.channel import MASK
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory, bits_of
from tandem.engine_core.constraints.workers.pool import Batch, WorkerPool, are_current
from tandem.engine_core.contracts import IndexedMasks, cache_of
from tandem.protocol.stats import EngineStats

Ints = NDArray[np.int32]
Pairs = Sequence[tuple[GrammarConstraint, int]]
"""`IndexedMasks` of this package."""


class MaskJobs(Struct, frozen=True):
    """Matchers that write masks."""

    ids: Ints
    """`GrammarConstraint.remote_id` of each."""
    indices: Ints
    """Indices of their masks."""
    is_whole: bool
    """True if workers have all of them."""
    batches: list[Batch]
    """Operations of the workers."""


class PrefetchedMasks(Struct, frozen=True):
    """Masks that workers have been asked to compute."""

    masks: IndexedMasks
    out: Ints
    jobs: MaskJobs

    def holds(self, masks: IndexedMasks, out: Ints) -> bool:
        """Return True if exactly these masks were prefetched and all their matchers are on workers."""
        is_same = masks is self.masks and out is self.out
        return is_same and self.jobs.is_whole and are_current(self.jobs.batches)


HEAD_WORDS = 64
"""Words of a mask that are looked at first for anything that is allowed."""
EVERYTHING = np.int32(-1)
"""Word of a mask that allows all its tokens."""


class MaskBuilder:
    """Implement `runtime.masks.MaskFiller` for `GrammarConstraint`s only."""

    def __init__(
        self,
        end_ids: Sequence[int],
        stats: EngineStats,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
        workers: WorkerPool | None = None,
        memory: MaskMemory | None = None,
    ) -> None:
        """Keep the end ids as words and bits of a mask.

        end_ids: ids that end a sequence; clock: seconds, for the time that masks take; cpu_clock: CPU time in seconds
        of the calling thread; workers: follow some of the constraints; memory: the arrays that they can write.
        """
        self._end_words, self._end_bits = bits_of(end_ids)
        self.stats = stats
        self.clock = clock
        self.cpu_clock = cpu_clock
        self._budget = MaskBudget(clock)
        self.workers = workers
        self.memory = memory or MaskMemory()
        self._prefetched: PrefetchedMasks | None = None
        """Masks passed to `prefetch` since the last `fill`."""

    def allocate(self, rows: int, words: int) -> Ints | None:
        return None if self.workers is None else self.memory.allocate(rows, words)

    def prefetch(self, masks: IndexedMasks, out: Ints) -> None:
        """Implement `runtime.masks.MaskFiller.prefetch`.

        Operations that were added to their batches before are sent too.
        """
        if self.workers is not None and masks:
            first = self.memory.first_index(out)
            kept = cache_of(masks)
            jobs: MaskJobs | None = kept.get(("jobs", first))
            if jobs is not None and are_current(jobs.batches):
                self.workers.repeat(jobs.batches)
            else:
                ids, indices = _matchers(cast("Pairs", masks))
                batches = self.workers.enqueue(MASK, ids, indices + first)
                jobs = MaskJobs(ids, indices, bool(ids.min() >= 0), batches)
                if jobs.is_whole:  # local matchers may still move to a worker
                    kept["jobs", first] = jobs
            self._prefetched = PrefetchedMasks(masks, out, jobs)
            self.workers.post_awaited()

    def fill(self, masks: IndexedMasks, out: Ints) -> None:
        """Implement `runtime.masks.MaskFiller.fill` with the constraints' matchers.

        A matcher that has failed allows the end ids only, and one whose masks took too long everything; `accept`
        rejects those tokens.
        """
        start = self.clock()
        pairs = cast("Pairs", masks)
        assert out.flags.c_contiguous and out.dtype == np.int32, f"{out.dtype} of strides {out.strides} for masks"
        if self.workers is None:
            self._compute_measured(pairs, out)
            may_end = pairs
        else:
            may_end = self._compute_with_workers(self.workers, pairs, out)
        endless = [index for constraint, index in may_end if constraint.ignore_ends]
        if endless:
            self._drop_ends(endless, out)
        self.stats.mask_rows += len(pairs)
        self.stats.mask_seconds += self.clock() - start

    def _compute_measured(self, pairs: Pairs, out: Ints) -> None:
        """Compute masks on the calling thread, and charge their CPU time.

        Constraints that have spent their budget get a mask at no cost. All matchers are in this process.
        """
        address, size, clock = out.ctypes.data, out.strides[0], self.clock
        cpu, since, others = self.cpu_clock(), clock(), 0.0
        assert not pairs or 0 <= min([i for _, i in pairs]) <= max([i for _, i in pairs]) < len(out), (
            f"masks of {pairs} in {len(out)}"
        )
        for constraint, index in pairs:
            cost = constraint.cost
            if cost.debt or constraint.overdrawn:
                if self._is_overdrawn(constraint, index, out):
                    continue
                cpu, since, others = self.cpu_clock(), clock(), 0.0
            matcher = constraint.local
            assert matcher is not None, "a worker has the matcher"
            matcher.write_mask(address + index * size, size)
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

    def _compute_with_workers(self, workers: WorkerPool, pairs: Pairs, out: Ints) -> Pairs:
        """Compute masks here while the workers compute theirs.

        Those that a worker refuses or cannot give are computed here afterwards. Return those that may allow end ids:
        the workers have looked at theirs.
        """
        prefetched, self._prefetched = self._prefetched, None
        here: list[tuple[GrammarConstraint, int]] = []
        late: list[tuple[GrammarConstraint, int]] = []
        if prefetched is None or not prefetched.holds(pairs, out):
            here, late = self._enqueue_missing(workers, prefetched, pairs, out)
            self._compute_measured(here, out)
        workers.wait()
        if workers.take_refused():
            computed = {index for _, index in (*here, *late)}
            late += [pair for pair in pairs if pair[1] not in computed and not _is_written(pair[0])]
        if late:
            # Until now a worker could still write the mask of one that was taken back.
            self._compute_measured(late, out)
        return pairs if workers.take_ending() else here + late

    def _enqueue_missing(
        self, workers: WorkerPool, prefetched: PrefetchedMasks | None, pairs: Pairs, out: Ints
    ) -> tuple[list[tuple[GrammarConstraint, int]], list[tuple[GrammarConstraint, int]]]:
        """Let the workers compute their masks that were not prefetched.

        Return the masks of this process, and separately those that a worker may still overwrite.
        """
        ids, indices = _matchers(pairs)
        writers = np.full(len(out), -1, dtype=np.int32)
        if prefetched is not None and prefetched.out is out:
            writers[prefetched.jobs.indices] = prefetched.jobs.ids
        written_by = writers[indices]
        is_here, is_missing = ids < 0, (written_by != ids) & (ids >= 0)
        if is_missing.any():
            workers.enqueue(MASK, ids[is_missing], self.memory.first_index(out) + indices[is_missing])
            workers.post_awaited()
        here = [pairs[index] for index in np.flatnonzero(is_here & (written_by < 0)).tolist()]
        late = [pairs[index] for index in np.flatnonzero(is_here & (written_by >= 0)).tolist()]
        return here, late

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
        # Nearly every such mask allows one of the first ids too, and looking at all of it takes microseconds.
        only_late = ~out[rows, :HEAD_WORDS].any(axis=1)
        for index, words in zip(rows[only_late].tolist(), found[only_late], strict=True):
            if not out[index].any():
                out[index, self._end_words] = words


def _is_written(constraint: GrammarConstraint) -> bool:
    """Return whether a worker has written a mask."""
    return constraint.remote is not None and constraint.remote.end_mask()


def _matchers(pairs: Pairs) -> tuple[Ints, Ints]:
    """Return the `remote_id` of each constraint, and the index of its mask."""
    ids = np.array([constraint.remote_id for constraint, _ in pairs], dtype=np.int32)
    return ids, np.array([index for _, index in pairs], dtype=np.int32)
