"""Pages for the rows of a step, and who gives his up when there are none.

Preemption is by recompute: the sequence loses its row and its pages, returns to the queue with the tokens it has, and
computes them again. Its full pages stay in the prefix cache until they are evicted. The most senior sequence
(`seniority`) is never preempted; others are, until it has the pages it needs. No later arrival becomes senior to it
once `ARRIVALS_PER_PRIORITY` arrivals for each step of priority have come, so under any load at least one sequence makes
progress, then the next.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.scheduler.queue import seniority
from tandem.engine_core.sequence import Sequence


class PageReserver:
    """Fits a step into the pool."""

    def __init__(self, memory: KVManager, preempt: Callable[[Sequence], None]) -> None:
        """preempt: takes a sequence out of the running ones."""
        self.memory = memory
        self.preempt = preempt
        self.out_of_pages = False
        """Set where a row found no page. Nobody is admitted then."""

    def reserve(
        self, candidates: Items[Sequence], takes: list[int], running: dict[int, Sequence], held: Iterable[Sequence]
    ) -> None:
        """Finds pages for what each candidate takes; takes become smaller, or 0, where there are none.

        Seniors come first. A row that finds none waits for what steps in flight give back, and where that is not
        enough juniors are preempted.
        """
        size = self.memory.page_size
        short = [
            index
            for index, (seq, take) in enumerate(zip(candidates, takes, strict=True))
            if take and seq.num_scheduled_tokens + take > len(seq.pages) * size
        ]
        short.sort(key=lambda index: seniority(candidates[index]))
        pressure: Reclaim | None = None
        for index in short:
            seq = candidates[index]
            if seq.id not in running:
                continue
            wanted = takes[index]
            takes[index] = self._grow(seq, wanted)
            if takes[index]:
                continue
            pressure = pressure or Reclaim(self.memory, running, held)
            while (victim := pressure.victim(seq)) is not None:
                self.preempt(victim)
                pressure.add(victim)
                takes[index] = self._grow(seq, wanted)
                if takes[index]:
                    break
            else:
                self.out_of_pages = True
                pressure.promised += 1
        if pressure is not None:
            for index, seq in enumerate(candidates):
                if seq.id not in running:
                    takes[index] = 0

    def _grow(self, seq: Sequence, take: int) -> int:
        """How many of these positions have pages now."""
        if self.memory.grow(seq, seq.num_scheduled_tokens + take):
            return take
        pages = len(seq.pages) + self.memory.available
        end = pages * self.memory.page_size
        if end <= seq.num_scheduled_tokens or not self.memory.grow(seq, end):
            return 0
        return end - seq.num_scheduled_tokens


class Reclaim:
    """What a step without enough pages knows: which pages come back anyway, and who might give up others."""

    def __init__(self, memory: KVManager, running: dict[int, Sequence], held: Iterable[Sequence]) -> None:
        self.memory = memory
        self.running = running
        self.reclaimable = memory.settling
        """Pages that steps in flight will give back: of those that have ended, are ending, or were preempted."""
        self.promised = 0
        """Rows that wait for them."""
        self._ending: dict[int, int] = {}
        """Shared pages of those, with how many of their readers go."""
        self._juniors = sorted(running.values(), key=seniority, reverse=True)
        for seq in held:
            if seq.id not in running or seq.finishing:
                self.add(seq)

    def add(self, seq: Sequence) -> None:
        """Its pages come back with the last step that holds it, a shared one with its last reader."""
        self.reclaimable += len(seq.pages) - seq.num_shared_pages
        for page in seq.pages[: seq.num_shared_pages]:
            going = self._ending[page] = self._ending.get(page, 0) + 1
            self.reclaimable += going == self.memory.readers(page)

    def victim(self, seq: Sequence) -> Sequence | None:
        """Who has to go for this one: nobody while more is coming than others wait for. The most junior of its juniors
        that holds a page alone; if there is none, the most junior, for what it shares may be free with the next."""
        if self.reclaimable > self.promised:
            return None
        last: Sequence | None = None
        for other in self._juniors:
            if seniority(other) <= seniority(seq):
                break
            if other.id not in self.running or other.finishing:
                continue
            if self.memory.holds_alone(other):
                return other
            last = last or other
        return last
