"""Percentiles of a sample."""

import math
from collections.abc import Iterable, Sequence

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of a non-empty ascending sample.

    It interpolates linearly between ranks like numpy's default. The rank is percent / 100 x (n - 1), counted from 0.
    """
    rank = percent / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def distribution(
    values: Iterable[float], scale: float = 1.0, percentiles: Sequence[float] = QUANTILES
) -> dict[str, float]:
    """Summarize a sample multiplied by `scale`.

    The summary has count, mean, extremes and percentiles (`p50`, ...); for an empty sample only the count.
    """
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return {"count": 0}
    summary = {"count": len(ordered), "mean": math.fsum(ordered) / len(ordered), "min": ordered[0]}
    summary |= {f"p{percent:g}": percentile(ordered, percent) for percent in percentiles}
    return summary | {"max": ordered[-1]}
