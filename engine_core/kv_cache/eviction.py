"""Eviction order of the prefix cache: least recently used first.

It is kept as a lazy heap.
"""

import heapq
import sys
from collections.abc import Callable

IsValid = Callable[[int, int], bool]
"""Function from (node, last use) to True if the node may still be evicted and was not used since."""


class EvictionQueue:
    """Evictable nodes, ordered by last use.

    Entries that have become invalid stay in the heap until they reach its top, or until they outnumber the valid ones.
    """

    SLACK = 64
    """Number of invalid entries that are never worth removing before they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of entries, invalid ones included."""
        return len(self._heap)

    @property
    def oldest_use(self) -> int:
        """Last use of the first entry, which may be invalid.

        The largest integer if the queue is empty.
        """
        return self._heap[0][0] if self._heap else sys.maxsize

    def oldest_valid_use(self, is_valid: IsValid) -> int:
        """Return the last use of the first valid entry, and remove the invalid ones before it.

        The largest integer if no entry is valid.
        """
        while self._heap and not is_valid(self._heap[0][1], self._heap[0][0]):
            heapq.heappop(self._heap)
        return self.oldest_use

    def push(self, node: int, last_use: int, is_valid: IsValid, max_valid: int) -> None:
        """Add a node to the queue.

        max_valid: largest number of entries that can be valid; the heap keeps to twice that number, and `SLACK`.
        """
        heapq.heappush(self._heap, (last_use, node))
        if len(self._heap) > 2 * max_valid + self.SLACK:
            self._heap = [(use, known) for use, known in self._heap if is_valid(known, use)]
            heapq.heapify(self._heap)

    def pop(self, is_valid: IsValid) -> int | None:
        """Remove and return the least recently used node, or None if no entry is valid."""
        while self._heap:
            last_use, node = heapq.heappop(self._heap)
            if is_valid(node, last_use):
                return node
        return None
