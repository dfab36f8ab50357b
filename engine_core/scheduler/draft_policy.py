"""Choice of the number of drafts that a step verifies.

All rows of a step verify the same number, one for which graphs are captured. It is chosen from committed counts, which
lag one step behind.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Items

from tandem.engine_core.graph_sizes import MAX_ADAPTED_ROWS, MAX_VERIFY_POSITIONS
from tandem.engine_core.sequence import Sequence

MIN_EXPECTED, ROWS_PER_EXPECTED = 0.1, 400
"""A step verifies drafts if rows have at least MIN_EXPECTED + rows / ROWS_PER_EXPECTED accepted drafts on average: with
one draft per row it takes longer by about this fraction."""
FEW_ROWS = 8
"""Maximum number of rows with which a step verifies twice the average number of accepted drafts: they take little time,
and for most texts either all drafts are accepted or none."""
PROBE_INTERVAL, PROBE_DRAFTS = 16, 3
"""Number of steps without drafts after which a step tries some, since a text may begin to repeat, and their number. The
interval is the number of rows if that is larger, since more rows take longer to verify."""


class DraftPolicy:
    """Choose the number of drafts of each step."""

    def __init__(
        self,
        sizes: Items[int],
        fixed: int | None = None,
        row_counts: Items[int] = (),
        max_positions: int = MAX_VERIFY_POSITIONS,
        has_model: bool = False,
    ) -> None:
        """Store the numbers to choose from.

        sizes: ascending; empty: no step verifies drafts; fixed: number of drafts of every step, as far as a step has
        room for them; None: adapted to the accepted drafts; row_counts: row counts of the captured graphs, ascending: a
        step is padded to one of them, and verifies no drafts if it has more rows; empty: any number, without padding;
        max_positions: maximum number of positions of a step that verifies drafts, padding included; has_model: True if
        a draft model proposes them.
        """
        self.sizes = tuple(sizes)
        self.fixed = fixed
        self.row_counts = tuple(row_counts)
        self.max_positions = min(max_positions, MAX_VERIFY_POSITIONS)
        self.has_model = has_model
        self._since_drafts = 0

    @property
    def most(self) -> int:
        """Maximum number of drafts that a step verifies for any sequence; 0 if no step verifies drafts."""
        return self.fixed or self.sizes[-1] if self.sizes else 0

    def max_drafts(self, seq: Sequence) -> int:
        """Return the largest number of drafts that a step verifies for a sequence."""
        return 0 if seq.constraint is not None or not seq.submit.speculation else self.most

    def choose(self, sequences: Items[Sequence], has_adapters: bool = False) -> int:
        """Return the number of drafts of the next step of these sequences.

        It exceeds the average number of accepted drafts, so that it can grow. Sequences without drafts count as rows
        without accepted drafts. has_adapters: True if one of them has an adapter, as fewer steps are captured then.
        """
        drafting = [seq.drafts.expected for seq in sequences if seq.drafts.max_drafts]
        if not drafting:
            return 0
        rows = len(sequences)
        positions = min(self.max_positions, MAX_ADAPTED_ROWS) if has_adapters else self.max_positions
        largest = self._at_most(positions // self.padded(rows) - 1)
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

    def padded(self, rows: int) -> int:
        """Return the padded number of rows of a step; more than `max_positions` if no graph is large enough."""
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
