"""Estimates of how many drafts of a step will be accepted, from those of the last steps."""

import math
from collections.abc import Sequence as Items

PRIOR, PRIOR_WEIGHT = 0.6, 0.1
"""Probability with which a first draft is expected to be accepted before any was verified, and the number of drafts
that this counts as."""
LATER_SHARE = 0.05
"""Number of drafts as which the estimate of the position before counts, as a share of the maximum weight of a single
row: later drafts of one row are verified so rarely that their own share would be noise for a hundred steps."""
PROBED_WEIGHT = 2.0
"""Maximum number of earlier drafts that count once steps verify none, so that a few new ones can change that."""
RECENT_MEMORY = 0.8
"""Share of the weight of earlier steps that is left after a step where only the last steps count."""
DEVIATIONS = 3.5
"""Number of standard deviations by which the last steps have to differ from all steps for those to be forgotten."""


class Counts:
    """Drafts of the last steps, by position; those of earlier steps count less."""

    def __init__(self, positions: int, memory: float) -> None:
        """Begin without drafts. memory: as in `Acceptance`."""
        self.memory = memory
        self.tried = [0.0] * positions
        self.right = [0.0] * positions

    def add(self, tried: Items[int], right: Items[int]) -> None:
        """Add the drafts of a step; tried, right: as in `Acceptance.observe`.

        Earlier steps, which may have had many more rows, count at most as much as they would have with the rows of this
        one: else a single row would have drafts for hundreds of steps because those of 64 rows were accepted.
        """
        if not tried or not tried[0]:
            return
        share = self.memory * min(1.0, tried[0] / (1 - self.memory) / max(self.tried[0], 1.0))
        self.tried = [share * old + new for old, new in zip(self.tried, tried, strict=True)]
        self.right = [share * old + new for old, new in zip(self.right, right, strict=True)]

    def limit(self, weight: float) -> None:
        """Reduce the number of drafts at each position to a maximum."""
        shares = [min(1.0, weight / tried) if tried else 1.0 for tried in self.tried]
        self.tried = [share * tried for share, tried in zip(shares, self.tried, strict=True)]
        self.right = [share * right for share, right in zip(shares, self.right, strict=True)]


class Acceptance:
    """The probability that the draft at each position is accepted if those before it were.

    Later drafts are verified in fewer steps. Where few count, the estimate is near that of the position before. Where
    the first drafts of the last steps contradict those before, as another text has begun, only the last steps count.
    """

    def __init__(self, positions: int, memory: float) -> None:
        """Begin without observations.

        positions: maximum number of drafts; memory: share of the weight of earlier steps that is left after a step.
        """
        self._later_weight = LATER_SHARE / (1 - memory)
        self._counts = Counts(positions, memory)
        self._recent = Counts(positions, min(memory, RECENT_MEMORY))
        self.survival = [0.0] * positions
        """Probability that at least the first n + 1 drafts are accepted, by index n."""
        self._update()

    def observe(self, tried: Items[int], right: Items[int]) -> None:
        """Take the drafts of a step into account.

        tried: for each position, number of rows that had this draft and all drafts before it accepted; right: number of
        those whose draft was accepted.
        """
        for counts in (self._counts, self._recent):
            counts.add(tried, right)
        if self._has_changed():
            self._counts.tried, self._counts.right = self._recent.tried, self._recent.right
        self._update()

    def forget(self) -> None:
        """Reduce the weight of earlier drafts."""
        for counts in (self._counts, self._recent):
            counts.limit(PROBED_WEIGHT)
        self._update()

    def certain_share(self, deviations: float) -> float:
        """Return the share of the first draft's probability that is left without some standard deviations of it.

        1 before any draft was verified, as there is nothing to doubt then.
        """
        tried, estimate = self._counts.tried[0], self.survival[0]
        if not tried or not estimate:
            return 1.0
        # Of a few drafts, all may be accepted or rejected by chance.
        most = 1 - 1 / (tried + 2)
        bounded = min(max(estimate, 1 - most), most)
        return max(0.0, 1 - deviations * math.sqrt(bounded * (1 - bounded) / tried) / estimate)

    def _has_changed(self) -> bool:
        """Return True if the first drafts of the last steps contradict the estimate."""
        tried, right = sum(self._recent.tried[:1]), sum(self._recent.right[:1])
        expected = (sum(self._counts.right[:1]) + PRIOR_WEIGHT * PRIOR) / (sum(self._counts.tried[:1]) + PRIOR_WEIGHT)
        # The variance of a sum with these weights, whose squares add up to less than they do.
        variance = tried * expected * (1 - expected) / (1 + self._recent.memory)
        return (right - expected * tried) ** 2 > DEVIATIONS**2 * variance

    def _update(self) -> None:
        before, weight, product = PRIOR, PRIOR_WEIGHT, 1.0
        for index, (some, accepted) in enumerate(zip(self._counts.tried, self._counts.right, strict=True)):
            before = (accepted + weight * before) / (some + weight)
            weight = self._later_weight
            product *= before
            self.survival[index] = product
