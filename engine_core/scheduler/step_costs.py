"""The expected duration of steps, from measurements at start and of later steps."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

from msgspec import Struct

from tandem.engine_core.plan import ScheduledSequence

NOISE = 0.1
"""Assumed deviation of a measured step from its expected duration, as a share of that duration."""
DRIFT = 0.02
"""Assumed change of each factor from one measured step to the next, as a share of its first deviation."""
FIRST_DEVIATION = (0.3, 0.3, 1.0, 1.0)
"""Assumed deviation of each factor from 1 before anything was measured."""
MIN_FACTOR = (0.1, 0.1, 0.0, 0.0)
"""Lowest value of each factor. A table that expected nothing could not be corrected any more."""


class StepWork(Struct, frozen=True, gc=False):
    """Work of a step, on which its duration depends."""

    rows: int
    """Number of rows of one position."""
    context: int
    """Positions that those rows attend to, in all."""
    tokens: int = 0
    """Positions of the longer rows, in all."""
    pairs: int = 0
    """Pairs of such a position and one that it attends to, in all."""

    @classmethod
    def of(cls, rows: Iterable[ScheduledSequence], num_drafts: int = 0) -> "StepWork":
        """Return the work of a step's rows.

        num_drafts: that each row of one position verifies: they cost as much as rows, without a context of their own.
        """
        single = context = tokens = pairs = 0
        for row in rows:
            if row.length == 1:
                single += 1
                context += row.start
            else:
                tokens += row.length
                pairs += num_pairs(row.start, row.length)
        return cls(single * (1 + num_drafts), context, tokens, pairs)


def num_pairs(start: int, length: int) -> int:
    """Return the number of pairs of a position and one that it attends to.

    The first of a pair is one of `length` positions from `start` on.
    """
    return length * start + length * (length + 1) // 2


def max_qk_pairs(prompts: Iterable[tuple[int, int]], tokens: int) -> int:
    """Return the largest total number of pairs that a step's prompts can have.

    It bounds every division of positions among them; for one prompt it is exact, for prompts of like lengths close.

    prompts: the start of each, and the positions that it lacks; tokens: positions of all together.
    """
    # No prompt can have more pairs a position than if it alone took all it can. Those with the most are taken first.
    shares = [
        (2 * start + lacking + 1, lacking) if lacking < tokens else (2 * start + tokens + 1, tokens)
        for start, lacking in prompts
    ]
    shares.sort(reverse=True)
    doubled, left = 0, tokens
    for pairs, length in shares:
        if length >= left:
            doubled += pairs * left
            break
        doubled += pairs * length
        left -= length
    return -(-doubled // 2)


class AttentionShare(Struct, frozen=True):
    """Attention's part of a step's work by arithmetic, to begin with."""

    context: float = 0.0
    """Bytes of one position's keys and values, relative to the bytes of the weights."""
    pairs: float = 0.0
    """FLOPs of one pair, relative to the GEMM FLOPs of one position."""


class StepCosts:
    """Table of the durations of steps with little context, and the cost of more.

    A step is expected to take `a * table(rows, tokens) + b * context + c * pairs`, where steps with prompts have an `a`
    of their own: they run other kernels, and the table's are measured without prompts to attend to. `context` leaves
    out the positions that rows without prompts attended to when they were timed. The four factors follow the measured
    steps through a Kalman filter (Kalman, 1960) with a random walk as its model, so that every measured step corrects
    the expectation of all others.
    """

    def __init__(
        self,
        table: Mapping[tuple[int, int], float],
        share: AttentionShare,
        state_copy_ms: float = 0.0,
        timed_context: int = 0,
    ) -> None:
        """Keep a table of milliseconds by (rows, tokens).

        It holds (rows, 0) for some row counts and (0, tokens) for some token counts, and may hold pairs of both. An
        empty table expects nothing. state_copy_ms: milliseconds of a copy of a recurrent state; timed_context:
        positions that each row of a (rows, 0) attended to.
        """
        self.state_copy_ms = state_copy_ms
        self._timed_context = timed_context
        self._table = dict(table)
        self._rows = sorted(rows for rows, tokens in self._table if not tokens)
        self._tokens = sorted(tokens for rows, tokens in self._table if not rows)
        self._mixed_rows = sorted({rows for rows, tokens in self._table if tokens})
        mixed = sorted({tokens for rows, tokens in self._table if rows and tokens})
        self._mixed_tokens = mixed or self._tokens
        self._context_ms = self._pair_ms = 0.0
        if self._table:
            self._context_ms = share.context * self._table[self._rows[0], 0]
            self._pair_ms = share.pairs * self._table[0, self._tokens[-1]] / self._tokens[-1]
        count = len(FIRST_DEVIATION)
        self._factors = [1.0] * count
        self._covariance = [[(i == j) * first**2 for j in range(count)] for i, first in enumerate(FIRST_DEVIATION)]

    @property
    def table(self) -> dict[tuple[int, int], float]:
        """Milliseconds by (rows, tokens), as measured at the start."""
        return dict(self._table)

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Token counts of the table, ascending."""
        return tuple(self._tokens)

    @property
    def mixed_token_sizes(self) -> tuple[int, ...]:
        """Token counts in the table for steps with decode rows, ascending; `token_sizes` if there are none."""
        return tuple(self._mixed_tokens)

    def milliseconds(self, work: StepWork) -> float:
        """Return the expected duration of a step; 0 without a table."""
        if not self._table:
            return 0.0
        return _dot(self._factors, self._features(work))

    def correct(self, work: StepWork, milliseconds: float) -> None:
        """Take the duration of a measured step into account.

        One that took more than twice as long as expected counts as twice: something else may have held it up.
        """
        if not self._table:
            return
        features = self._features(work)
        expected = _dot(self._factors, features)
        error = min(milliseconds - expected, expected)
        spread = [_dot(row, features) for row in self._covariance]
        variance = _dot(features, spread) + (NOISE * expected) ** 2
        gain = [part / variance for part in spread]
        self._factors = [
            max(factor + part * error, least)
            for factor, part, least in zip(self._factors, gain, MIN_FACTOR, strict=True)
        ]
        walked = [
            [entry - gain[i] * spread[j] + (i == j) * (DRIFT * FIRST_DEVIATION[i]) ** 2 for j, entry in enumerate(row)]
            for i, row in enumerate(self._covariance)
        ]
        # A factor that no step measures must not become arbitrary.
        limit = [min(1.0, first / sqrt(walked[i][i])) for i, first in enumerate(FIRST_DEVIATION)]
        self._covariance = [
            [entry * limit[i] * limit[j] for j, entry in enumerate(row)] for i, row in enumerate(walked)
        ]

    def _features(self, work: StepWork) -> tuple[float, float, float, float]:
        base = self._base(work.rows, work.tokens)
        if work.tokens:
            return 0.0, base, work.context * self._context_ms, work.pairs * self._pair_ms
        context = max(0, work.context - work.rows * self._timed_context)
        return base, 0.0, context * self._context_ms, 0.0

    def _base(self, rows: int, tokens: int) -> float:
        """Return the duration of a step without context.

        It is the duration of the smallest size in the table that holds the step.
        """
        if not rows or not tokens:
            return self._smallest(rows, tokens)
        more, size = _at_least(self._mixed_rows, rows), _at_least(self._mixed_tokens, tokens)
        if more >= rows and size >= tokens and (more, size) in self._table:
            return self._table[more, size]
        # Where the table does not combine them, rows cost as much as tokens.
        return self._smallest(0, tokens + rows)

    def _smallest(self, rows: int, tokens: int) -> float:
        """Return the duration of a step of rows or tokens alone.

        Beyond the largest size of the table it grows in proportion.
        """
        sizes = self._tokens if tokens else self._rows
        wanted = rows + tokens
        size = _at_least(sizes, wanted)
        found = self._table[(0, size) if tokens else (size, 0)]
        return found * max(1.0, wanted / size)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2] + one[3] * other[3]


def _at_least(sizes: list[int], wanted: int) -> int:
    """Return the smallest size that is not below `wanted`, else the largest."""
    return sizes[min(bisect_left(sizes, wanted), len(sizes) - 1)]
