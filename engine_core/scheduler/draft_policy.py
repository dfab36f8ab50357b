"""Choice of the number of drafts that a step verifies.

All rows of a step verify the same number, one for which graphs are captured: that with the most expected tokens per
millisecond, 0 if it is a plain step. Expected tokens follow from the acceptance in committed steps, which lag one step
behind, and milliseconds from measurements at the start (after Liu et al., 2024, "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput").
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Items

from tandem.engine_core.graph_sizes import MAX_ADAPTED_ROWS, MAX_VERIFY_POSITIONS
from tandem.engine_core.plan import catch_up_tokens
from tandem.engine_core.scheduler.acceptance import Acceptance
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.sequence import Sequence

PROBE_SHARE = 0.008
"""Share of the time of plain steps that may be spent on drafts to find out whether they are accepted again."""
MODEL_MEMORY, NGRAM_MEMORY = 0.985, 0.75
"""Share of the weight of earlier steps that is left after a step. The acceptance of n-gram drafts changes faster: a
text begins or ends to repeat."""
MIN_GAIN = 0.01
"""Share by which tokens per millisecond have to exceed those of plain steps: less is lost in the noise of estimates."""
LEAST_COST = 0.05
"""Minimum cost of a probe, as a share of a plain step: by measured costs verification may be free, and each step would
probe."""
MAX_PROBES = 4
"""Maximum number of probes that plain steps save up for, without positions to make up for: new requests have none."""
CATCH_UP_STEPS = 256
"""Number of steps with drafts that have to make up for the positions that the draft model lacks."""
COSTLY_CATCH_UP, DOUBT = 2.0, 1.5
"""Where making up for positions takes longer than this number of plain steps, estimates are reduced by this number of
standard deviations: with 64 rows, drafts by a mistaken estimate cost more than 2 % of the tokens of the next 200 steps.
"""
MAX_GAP = 2
"""Largest number of positions that the draft model lacks after a step with drafts: that of the newest token, and that
of the last draft if it was accepted."""


class DraftPolicy:
    """Choose the number of drafts of each step."""

    def __init__(
        self,
        sizes: Items[int],
        fixed: int | None = None,
        row_counts: Items[int] = (),
        max_positions: int = MAX_VERIFY_POSITIONS,
        has_model: bool = False,
        costs: DraftCosts | None = None,
    ) -> None:
        """Store the numbers to choose from.

        sizes: ascending; empty: no step verifies drafts; fixed: number of drafts of every step, as far as a step has
        room for them; None: adapted to the accepted drafts; row_counts: row counts of the captured graphs, ascending: a
        step is padded to one of them, and verifies no drafts if it has more rows; empty: any number, without padding;
        max_positions: maximum number of positions of a step that verifies drafts, padding included; has_model: True if
        a draft model proposes them; costs: durations of steps, None if they were not measured.
        """
        self.sizes = tuple(sizes)
        self.fixed = fixed
        self.row_counts = tuple(row_counts)
        self.max_positions = min(max_positions, MAX_VERIFY_POSITIONS)
        self.has_model = has_model
        self.costs = costs or DraftCosts.assumed(self.sizes, has_model)
        self.acceptance = Acceptance(max(self.sizes, default=0), MODEL_MEMORY if has_model else NGRAM_MEMORY)
        self.max_catch_up: int | None = None
        """Maximum number of positions that the draft model may make up for in the chosen step; None: no limit."""
        self._room_ms = 0.0
        """Milliseconds that probes may take now."""

    @property
    def most(self) -> int:
        """Maximum number of drafts that a step verifies for any sequence; 0 if no step verifies drafts."""
        return self.sizes[-1] if self.sizes else 0

    def max_drafts(self, seq: Sequence) -> int:
        """Return the largest number of drafts that a step verifies for a sequence."""
        return 0 if seq.constraint is not None or not seq.submit.speculation else self.most

    def choose(self, sequences: Items[Sequence], has_adapters: bool = False) -> int:
        """Return the number of drafts of the next step of these sequences.

        has_adapters: True if one of them has an adapter, as fewer steps are captured then.
        """
        drafting = [seq for seq in sequences if seq.drafts.max_drafts]
        self.max_catch_up = None
        if not drafting:
            return 0
        rows = len(sequences)
        padded = self.padded(rows)
        positions = min(self.max_positions, MAX_ADAPTED_ROWS) if has_adapters else self.max_positions
        largest = self._at_most(positions // padded - 1)
        if self.fixed is not None or not largest:
            return min(largest, self.sizes[-1])
        context = sum([seq.num_scheduled_tokens for seq in sequences]) / rows
        plain = self.costs.milliseconds(padded, 0, context)
        gaps = self._gaps(drafting, padded)
        missing_ms = self.costs.catch_up_ms(sum(gaps))
        catch_up = missing_ms / CATCH_UP_STEPS
        certain = self.acceptance.certain_share(DOUBT) if missing_ms > COSTLY_CATCH_UP * plain else 1.0
        best, chosen = (1 + MIN_GAIN) * rows / plain, 0
        expected = float(rows)
        for index, survival in enumerate(self.acceptance.survival[:largest]):
            expected += len(drafting) * survival * certain
            if index + 1 in self.sizes:
                rate = expected / (self.costs.milliseconds(padded, index + 1, context) + catch_up)
                if rate > best:
                    best, chosen = rate, index + 1
        if chosen:
            return chosen
        return self._probe(padded, context, plain, gaps)

    def _probe(self, rows: int, context: float, plain: float, gaps: list[int]) -> int:
        """Return the fewest drafts if plain steps have taken long enough to pay for them, else 0."""
        size = self.sizes[0]
        verify = max(LEAST_COST * plain, self.costs.milliseconds(rows, size, context) - plain)
        cost = verify + self.costs.catch_up_ms(min(gaps, default=0))
        self._room_ms = min(self._room_ms + PROBE_SHARE * plain, max(MAX_PROBES * verify, cost))
        if self._room_ms < cost:
            return 0
        self.max_catch_up = self.costs.catch_up_positions(self._room_ms - verify)
        self._room_ms -= max(cost, verify + self.costs.catch_up_ms(min(self.max_catch_up, sum(gaps))))
        self.acceptance.forget()
        return size

    def _gaps(self, drafting: Items[Sequence], rows: int) -> list[int]:
        """Return the number of positions that the draft model lacks of each row, 0 where it can draft at once."""
        if not self.has_model:
            return []
        room = catch_up_tokens(rows) - MAX_GAP
        return [
            seq.num_scheduled_tokens - seq.drafts.model_len if seq.drafts.model_lag > room else 0 for seq in drafting
        ]

    def observe(self, verified: Mapping[tuple[int, int], int]) -> None:
        """Take the drafts of a committed step into account.

        verified: number of rows by their drafts and accepted drafts, as in `SchedulerUpdates.verified`. A row for
        which nothing repeats has none: its first counts as rejected. Rows for which the draft model lacks positions are
        ignored, unless no row has a draft: its logits may be NaN. A fixed number of drafts does not depend on any.
        """
        if self.fixed is not None:
            return
        most = len(self.acceptance.survival)
        is_counted = not self.has_model or not any(count for count, _ in verified)
        tried, right = [0] * most, [0] * most
        for (count, good), rows in verified.items():
            if not count:
                tried[0] += rows * is_counted
            for index in range(min(good + 1, count)):
                tried[index] += rows
            for index in range(good):
                right[index] += rows
        self.acceptance.observe(tried, right)

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
