"""Page reservation for the rows of a step, and preemption.

When no page is left, junior sequences are preempted for senior ones.

Preemption is by recompute: the sequence loses its row and its pages, returns to the queue with the tokens it has, and
computes them again. Its full pages stay in the prefix cache until they are evicted. The most senior sequence
(`seniority`) is never preempted; others are, until it has the pages it needs. No later arrival becomes senior to it
once `ARRIVALS_PER_PRIORITY` arrivals for each step of priority have come, so under any load at least one sequence makes
progress, and after it the next one.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from tandem.engine_core.kv_cache.manager import KVManager, Leaving
from tandem.engine_core.scheduler.queue import seniority
from tandem.engine_core.sequence import Sequence


class PageReserver:
    """Reserve pages for the rows of a step."""

    def __init__(self, memory: KVManager, preempt: Callable[[Sequence], None]) -> None:
        """Keep the parts of a reserver.

        preempt: function that takes a sequence out of the running ones.
        """
        self.memory = memory
        self.preempt = preempt
        self.out_of_pages = False
        """True if a row of the last step found no page; then no sequence is admitted."""

    def reserve(
        self, candidates: Items[Sequence], lengths: list[int], running: dict[int, Sequence], held: Iterable[Sequence]
    ) -> None:
        """Reserve pages for the positions of each candidate, in order of seniority.

        lengths: positions of each candidate, lowered here, to 0 at worst, where pages are missing. A row without pages
        waits for pages that steps in flight release; if these are not enough, junior sequences are preempted.
        """
        lacks_pages = self.memory.lacks_pages
        short = [
            index
            for index, (seq, length) in enumerate(zip(candidates, lengths, strict=True))
            # The first test spares decoding rows within their page the call.
            if (length > 1 or (length and seq.num_scheduled_tokens >= seq.next_page_boundary))
            and lacks_pages(seq, self.memory.row_end(seq, length))
        ]
        short.sort(key=lambda index: seniority(candidates[index]))
        pressure: Reclaim | None = None
        for index in short:
            seq = candidates[index]
            if seq.id not in running:
                continue
            wanted = lengths[index]
            lengths[index] = self._grow(seq, wanted)
            if lengths[index]:
                continue
            pressure = pressure or Reclaim(self.memory, running, held)
            while (victim := pressure.victim(seq)) is not None:
                self.preempt(victim)
                pressure.add(victim)
                lengths[index] = self._grow(seq, wanted)
                if lengths[index]:
                    break
            else:
                self.out_of_pages = True
                pressure.promised += self.memory.num_groups
        if pressure is not None:
            for index, seq in enumerate(candidates):
                if seq.id not in running:
                    lengths[index] = 0

    def _grow(self, seq: Sequence, length: int) -> int:
        """Reserve pages for the next `length` positions, or fewer if the pool has too few.

        Return their number.
        """
        start, end = seq.num_scheduled_tokens, self.memory.row_end(seq, length)
        reached = self.memory.grow(seq, end)
        if end > start + length:  # Positions beyond the row's are needed as much.
            return length if reached == end else 0
        return max(0, reached - start)


class Reclaim:
    """Pages that a step can count on when the pool has too few.

    These are the pages that steps in flight release, and the pages of sequences that could be preempted.
    """

    def __init__(self, memory: KVManager, running: dict[int, Sequence], held: Iterable[Sequence]) -> None:
        self.memory = memory
        self.running = running
        self.reclaimable = 0
        """Number of pages that come back with the steps in flight, from sequences that end, ended or were preempted."""
        self.promised = 0
        """Number of pages that the rows wait for which got none."""
        self._leaving: Leaving = Leaving()
        """Readers of the prefix cache that leave."""
        self._juniors = sorted(running.values(), key=seniority, reverse=True)
        for seq in held:
            if seq.id not in running or seq.finishing:
                self.add(seq)

    def add(self, seq: Sequence) -> None:
        """Count the pages that a leaving sequence releases.

        Its own pages are released, and shared pages without another reader.
        """
        self.reclaimable += self.memory.add_leaving(seq, self._leaving)

    def victim(self, seq: Sequence) -> Sequence | None:
        """Return the sequence to preempt for this one, or None.

        None if enough pages are being released for this one and those that wait, or if no running sequence is junior to
        this one. The victim is the most junior sequence that would release a page at once, or else the most junior of
        all: the pages that it shares may become free with the next victim.
        """
        if self.reclaimable >= self.promised + self.memory.num_groups:
            return None
        last: Sequence | None = None
        for other in self._juniors:
            if seniority(other) <= seniority(seq):
                break
            if other.id not in self.running or other.finishing:
                continue
            if self.memory.num_released(other, {}):
                return other
            last = last or other
        return last
