"""Those that run."""

from tandem.engine_core.scheduler.logprobs import most_wanted
from tandem.engine_core.sequence import Sequence


class Running:
    """Sequences with a row, and which of them need more of a step than one position."""

    def __init__(self) -> None:
        self.members: dict[int, Sequence] = {}
        """By id, in the order of admission."""
        self.unsettled: set[int] = set()
        """Ids of those that are not settled."""
        self.following: set[int] = set()
        """Ids of those that follow a grammar."""
        self._observed: dict[int, int] = {}
        """Those that want log-probabilities, with the most alternatives that they want."""

    @property
    def logprobs(self) -> int:
        """As in `StepPlan`."""
        return max(self._observed.values()) if self._observed else -1

    def enter(self, seq: Sequence) -> None:
        self.members[seq.id] = seq
        self.unsettled.add(seq.id)
        if seq.constraint is not None:
            self.following.add(seq.id)
        wanted = most_wanted(seq)
        if wanted >= 0:
            self._observed[seq.id] = wanted

    def leave(self, seq: Sequence) -> None:
        """Nothing for one that does not run."""
        self.members.pop(seq.id, None)
        self.unsettled.discard(seq.id)
        self.following.discard(seq.id)
        self._observed.pop(seq.id, None)
