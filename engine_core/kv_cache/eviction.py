"""Which page of the prefix cache goes first: least recently used, kept as a lazy heap."""

import heapq
import sys
from collections.abc import Callable

Valid = Callable[[int, int], bool]
"""(page, last use) -> whether this entry still says the truth about the page."""


class EvictionQueue:
    """Pages by last use. An entry that is no longer true is not looked for: it is dropped when it comes up, or when
    such entries outnumber the others."""

    SLACK = 64
    """Stale entries that are never worth a clearing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries, stale ones too."""
        return len(self._heap)

    @property
    def oldest_use(self) -> int:
        """Last use of the first entry, which may be stale; of no entry, the largest number."""
        return self._heap[0][0] if self._heap else sys.maxsize

    def push(self, page: int, last_use: int, valid: Valid, live: int) -> None:
        """Adds a page. live: how many entries can be valid at most; the heap stays within twice as many."""
        heapq.heappush(self._heap, (last_use, page))
        if len(self._heap) > 2 * live + self.SLACK:
            self._heap = [(use, known) for use, known in self._heap if valid(known, use)]
            heapq.heapify(self._heap)

    def pop(self, valid: Valid) -> int | None:
        """The least recently used page, or None if there is none."""
        while self._heap:
            last_use, page = heapq.heappop(self._heap)
            if valid(page, last_use):
                return page
        return None
