"""The duration of steps that verify drafts, as measured at the start."""

from bisect import bisect_left
from collections.abc import Mapping

VERIFY_SHARE, ROWS_PER_SHARE, PASS_SHARE = 0.08, 600, 0.2
"""Where nothing was measured: the share of a plain step by which verification of any drafts takes longer, the number of
drafts of all rows that take as long as one more plain step, and the share of a plain step that a pass of a draft model
takes."""

MIN_MS = 1e-6
"""Milliseconds that anything takes at least: durations are divided by."""


class DraftCosts:
    """Table of milliseconds by rows and drafts at two lengths of context, with the passes of a draft model."""

    def __init__(
        self,
        table: Mapping[tuple[int, int], tuple[float, float]],
        contexts: tuple[int, int],
        token_ms: float = 0.0,
        span_ms: float = 0.0,
    ) -> None:
        """Store the measurements.

        table: milliseconds of a step of some rows, with some number of drafts each, 0 for a plain step, at both
        contexts, of which the longer one takes at least as long; it has the same numbers of drafts for all rows;
        contexts: positions of each row, ascending; token_ms, span_ms: milliseconds by which positions that the draft
        model computes as a prompt prolong a step, for each and for all of them.
        """
        self._table = {size: (max(short, MIN_MS), max(short, long, MIN_MS)) for size, (short, long) in table.items()}
        self._rows = sorted({rows for rows, _ in table})
        self._contexts = contexts
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}
        self.token_ms = token_ms
        self.span_ms = span_ms

    @classmethod
    def assumed(cls, sizes: tuple[int, ...], has_model: bool) -> "DraftCosts":
        """Return costs relative to a plain step, for steps that were not measured."""
        table = {(rows, 0): (1.0, 1.0) for rows in (1, 512)}
        for rows in (1, 512):
            for size in sizes:
                cost = 1 + VERIFY_SHARE + rows * size / ROWS_PER_SHARE + PASS_SHARE * size * has_model
                table[rows, size] = cost, cost
        return cls(table, (0, 1), PASS_SHARE / 256 if has_model else 0.0)

    def milliseconds(self, rows: int, drafts: int, context: float) -> float:
        """Return the expected duration of a step.

        It is interpolated between the measured rows and contexts, and extrapolated beyond them. drafts: a number of the
        table; context: average positions of a row.
        """
        base, slope = self._line(rows, drafts)
        return base + slope * max(0.0, context - self._contexts[0])

    def _line(self, rows: int, drafts: int) -> tuple[float, float]:
        """Return the milliseconds at the short context, and those of each position more; they are computed once."""
        if (rows, drafts) not in self._lines:
            known, (first, last) = self._rows, self._contexts
            above = min(max(bisect_left(known, rows), 1), len(known) - 1)
            low, high = known[max(0, above - 1)], known[above]
            share = (rows - low) / (high - low) if high > low else 0.0
            pairs = zip(self._table[low, drafts], self._table[high, drafts], strict=True)
            short, long = [at_low + (at_high - at_low) * share for at_low, at_high in pairs]
            self._lines[rows, drafts] = short, (long - short) / max(1, last - first)
        return self._lines[rows, drafts]

    def catch_up_ms(self, positions: int) -> float:
        """Return by how much a step takes longer if the draft model makes up for positions."""
        return self.span_ms + positions * self.token_ms if positions else 0.0

    def catch_up_positions(self, milliseconds: float) -> int:
        """Return the number of positions that the draft model makes up for in a time."""
        return int(max(0.0, milliseconds - self.span_ms) / max(self.token_ms, MIN_MS))
