"""Estimates of how many drafts of a step will be accepted, from those of the last steps."""

from collections.abc import Sequence as Items

PRIOR, PRIOR_WEIGHT = 0.6, 0.1
"""Probability with which a first draft is expected to be accepted before any was verified, and the number of drafts
that this counts as."""
PROBED_WEIGHT = 4.0
"""Maximum number of earlier drafts that count once steps verify none, so that some new ones can change that."""


class Acceptance:
    """The probability that the draft at each position is accepted if those before it were.

    Later drafts are verified in fewer steps. Where few count, the estimate is near that of the position before.
    """

    def __init__(self, positions: int, memory: float) -> None:
        """Begin without observations.

        positions: maximum number of drafts; memory: share of the weight of earlier steps that is left after a step.
        """
        self.memory = memory
        self._tried = [0.0] * positions
        self._right = [0.0] * positions
        self.survival = [0.0] * positions
        """Probability that at least the first n + 1 drafts are accepted, by index n."""
        self._update()

    def observe(self, tried: Items[int], right: Items[int]) -> None:
        """Take the drafts of a step into account.

        tried: for each position, number of rows that had this draft and all drafts before it accepted; right: number of
        those whose draft was accepted.
        """
        for index, (some, accepted) in enumerate(zip(tried, right, strict=True)):
            self._tried[index] = self.memory * self._tried[index] + some
            self._right[index] = self.memory * self._right[index] + accepted
        self._update()

    def forget(self) -> None:
        """Reduce the weight of earlier drafts."""
        for index, weight in enumerate(self._tried):
            if weight > PROBED_WEIGHT:
                self._tried[index] = PROBED_WEIGHT
                self._right[index] *= PROBED_WEIGHT / weight
        self._update()

    def _update(self) -> None:
        before, product = PRIOR, 1.0
        for index, (some, accepted) in enumerate(zip(self._tried, self._right, strict=True)):
            before = (accepted + PRIOR_WEIGHT * before) / (some + PRIOR_WEIGHT)
            product *= before
            self.survival[index] = product
