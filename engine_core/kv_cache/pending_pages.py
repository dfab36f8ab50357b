"""Pages that running sequences are about to compute.

Other sequences can wait for such a page instead of computing it too.
"""

from tandem.engine_core.sequence import Sequence


class PendingPages:
    """Registry of the pages that running sequences compute next.

    It maps the key of a page (`RadixTree.key`) to the running sequence that computes it, its producer.
    """

    def __init__(self) -> None:
        self._producers: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def __contains__(self, key: bytes) -> bool:
        return key in self._producers

    def blocks(self, seq: Sequence) -> bool:
        """Return True if a waiting sequence has to wait for its next page, because a producer of at least its own
        priority computes that page.
        """
        producer = self._producers.get(seq.cache.awaited_key)
        return producer is not None and producer.priority >= seq.priority

    def register(self, seq: Sequence, key: bytes) -> None:
        """Register a page's producer; replace one of lower priority.

        A sequence waits only for a producer of at least its own priority, so sequences that would not wait for the
        producer of lower priority can wait for this one.
        """
        other = self._producers.get(key)
        if other is not None:
            if other.priority >= seq.priority:
                return
            other.cache.pending_key = b""
        self._producers[key] = seq
        seq.cache.pending_key = key

    def remove(self, seq: Sequence) -> None:
        """Remove the page that a sequence has registered, if there is one."""
        if seq.cache.pending_key:
            del self._producers[seq.cache.pending_key]
            seq.cache.pending_key = b""
