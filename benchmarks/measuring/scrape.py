"""Parse Prometheus metrics and compare two readings."""

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Buckets = list[tuple[float, float]]
"""Upper bounds and cumulative counts of a histogram, in ascending order."""


class Scrape:
    """One reading of the engine's metrics."""

    def __init__(self, text: str) -> None:
        self._samples: list[Sample] = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def value(self, name: str) -> float:
        """Return the sum of a metric's series, 0 without any."""
        return sum(sample.value for sample in self._samples if sample.name == name)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric's series by a label."""
        return {sample.labels[label]: sample.value for sample in self._samples if sample.name == name}

    def histogram(self, name: str) -> Buckets:
        found = [s for s in self._samples if s.name == f"{name}_bucket"]
        return sorted((float(sample.labels["le"]), sample.value) for sample in found)


def histogram_summary(before: Scrape, after: Scrape, name: str, quantiles: tuple[int, ...]) -> dict[str, float]:
    """Return mean and percentiles of the observations between two readings."""
    count = after.value(f"{name}_count") - before.value(f"{name}_count")
    total = after.value(f"{name}_sum") - before.value(f"{name}_sum")
    mean = {"mean": total / count} if count > 0 else {}
    return mean | histogram_quantiles(before.histogram(name), after.histogram(name), quantiles)


def histogram_quantiles(before: Buckets, after: Buckets, quantiles: tuple[int, ...]) -> dict[str, float]:
    """Return percentiles of the observations between two readings.

    Interpolates linearly within a bucket; the last bucket, which has no upper bound, counts as its lower bound.
    Returns {} without observations.
    """
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return {}
    return {f"p{quantile}": _quantile(counts, total * quantile / 100) for quantile in quantiles}


def _quantile(counts: Buckets, rank: float) -> float:
    low, seen = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if bound == float("inf") or count == seen:
                return low
            return low + (bound - low) * (rank - seen) / (count - seen)
        low, seen = bound, count
    return low
