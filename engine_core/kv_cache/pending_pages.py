"""Pages that running sequences are about to compute, so that others wait for them instead of computing them too."""

from tandem.engine_core.sequence import Sequence


class PendingPages:
    """The running sequence that computes a page next, by the page's key (`RadixTree.key`)."""

    def __init__(self) -> None:
        self._producers: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def __contains__(self, key: bytes) -> bool:
        return key in self._producers

    def blocks(self, seq: Sequence) -> bool:
        """Return whether the page that a waiting sequence awaits is pending at no lower priority than its own."""
        producer = self._producers.get(seq.cache.awaited_key)
        return producer is not None and producer.priority >= seq.priority

    def register(self, seq: Sequence, key: bytes) -> None:
        """Register a page's producer; replace one of lower priority.

        Waiters only wait for producers of at least their own priority, so those who will not wait for the one of lower
        priority can wait for each other.
        """
        other = self._producers.get(key)
        if other is not None:
            if other.priority >= seq.priority:
                return
            other.cache.pending_key = b""
        self._producers[key] = seq
        seq.cache.pending_key = key

    def remove(self, seq: Sequence) -> None:
        """Remove what a sequence has registered, if anything."""
        if seq.cache.pending_key:
            del self._producers[seq.cache.pending_key]
            seq.cache.pending_key = b""
