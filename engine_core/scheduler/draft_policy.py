"""Number of drafts that the rows of a step verify.

It is one number for all rows of a step, one of those that graphs are captured for. It is chosen from committed counts,
which are one step old.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Items

from tandem.engine_core.graph_sizes import MAX_VERIFY_POSITIONS
from tandem.engine_core.sequence import Sequence

WEIGHT = 0.25
"""Weight of a step in the moving average of a sequence's right drafts."""
MIN_EXPECTED, ROWS_PER_EXPECTED = 0.1, 400
"""Right drafts that a row must have in a step on average: the first, and one more for that many rows. A step with one
draft per row takes about as much longer."""
FEW_ROWS = 8
"""Rows up to which a step verifies twice as many drafts as are right on average: they take little time, and most texts
have either all of their drafts right or none."""
PROBE_INTERVAL, PROBE_DRAFTS = 16, 3
"""Steps without drafts after which one verifies some, to notice when a text begins to repeat, and how many. With more
rows, which take longer to verify, it is as many steps as rows."""


class DraftPolicy:
    """Choose the numbers of drafts of steps."""

    def __init__(
        self,
        sizes: Items[int],
        fixed: int | None = None,
        row_counts: Items[int] = (),
        max_positions: int = MAX_VERIFY_POSITIONS,
    ) -> None:
        """Keep the numbers to choose from.

        sizes: ascending; empty: no step verifies drafts; fixed: number of drafts of every step, as far as a step has
        room for them; None: it follows the right drafts of the rows; row_counts: ascending, those that graphs hold:
        a step is padded to one of them, and verifies no drafts with more rows; empty: any number, without padding;
        max_positions: of a step that verifies drafts, padding included.
        """
        self.sizes = tuple(sizes)
        self.fixed = fixed
        self.row_counts = tuple(row_counts)
        self.max_positions = min(max_positions, MAX_VERIFY_POSITIONS)
        self._since_drafts = 0

    def max_drafts(self, seq: Sequence) -> int:
        """Return the largest number of drafts that a step verifies for a sequence."""
        if not self.sizes or seq.constraint is not None or not seq.submit.speculation:
            return 0
        return self.fixed or self.sizes[-1]

    def choose(self, sequences: Items[Sequence]) -> int:
        """Return the number of drafts of the next step of these sequences.

        It grows beyond the average of right drafts, so that more of them can be noticed. Sequences without drafts count
        as rows that get nothing from the step.
        """
        drafting = [seq.drafts.expected for seq in sequences if seq.drafts.max_drafts]
        if not drafting:
            return 0
        rows = len(sequences)
        largest = self._at_most(self.max_positions // self._padded(rows) - 1)
        if self.fixed is not None:
            return min(largest, self.sizes[-1])
        expected = sum(drafting)
        if expected >= (MIN_EXPECTED + rows / ROWS_PER_EXPECTED) * rows:
            average = expected / len(drafting)
            chosen = min(largest, self._at_least(round(2 * average if rows <= FEW_ROWS else average) + 1))
        else:
            is_due = self._since_drafts + 1 >= max(PROBE_INTERVAL, rows)
            chosen = min(largest, self._at_least(PROBE_DRAFTS)) if is_due else 0
        self._since_drafts = 0 if chosen else self._since_drafts + 1
        return chosen

    def _padded(self, rows: int) -> int:
        """Return the number of rows of a step, padding included; more than any step has if no graph holds them."""
        if not self.row_counts:
            return rows
        index = bisect_left(self.row_counts, rows)
        return self.row_counts[index] if index < len(self.row_counts) else self.max_positions + 1

    def _at_most(self, wanted: int) -> int:
        """Return the largest size that is not above `wanted`, else 0."""
        index = bisect_right(self.sizes, wanted)
        return self.sizes[index - 1] if index else 0

    def _at_least(self, wanted: int) -> int:
        """Return the smallest size that is not below `wanted`, else the largest."""
        return self.sizes[min(bisect_left(self.sizes, wanted), len(self.sizes) - 1)]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Take the drafts of a row of a committed step into account.

        accepted: number of them that were right.
        """
        stats = seq.drafts
        stats.drafted += drafted
        stats.accepted += accepted
        stats.expected += WEIGHT * (accepted - stats.expected)
