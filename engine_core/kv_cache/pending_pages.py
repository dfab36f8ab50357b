"""Who computes which page next, so that others who need it wait instead of computing it as well."""

from tandem.engine_core.sequence import Sequence


class PendingPages:
    """Running sequences by the key of the page (`RadixTree.key`) that they are going to compute next."""

    def __init__(self) -> None:
        self._claimants: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        return len(self._claimants)

    def __contains__(self, key: bytes) -> bool:
        return key in self._claimants

    def holds_up(self, seq: Sequence) -> bool:
        """Whether what a waiting sequence awaits is claimed by one of no lower priority."""
        claimant = self._claimants.get(seq.awaited_key)
        return claimant is not None and claimant.priority >= seq.priority

    def make(self, seq: Sequence, key: bytes) -> None:
        """Unless another was first, and is no less urgent: else those who will not wait for that one would not for
        each other either."""
        other = self._claimants.get(key)
        if other is not None:
            if other.priority >= seq.priority:
                return
            other.pending_key = b""
        self._claimants[key] = seq
        seq.pending_key = key

    def drop(self, seq: Sequence) -> None:
        if seq.pending_key:
            del self._claimants[seq.pending_key]
            seq.pending_key = b""
