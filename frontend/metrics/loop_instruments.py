"""Instruments without locks, for what is counted for each token."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopCounter(Collector):
    """Counter that only the thread of the event loop counts up.

    It needs no lock, which is a good part of the cost of a token.
    """

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name = name
        self._text = text
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the counter for a scrape."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class LoopHistogram(Collector):
    """Histogram that only the thread of the event loop observes, without a lock."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._buckets = tuple(buckets)
        self._bounds = (*map(floatToGoString, buckets), "+Inf")
        """Labels of the buckets, which take longer to write than to count."""
        self._counts = [0] * (len(self._buckets) + 1)
        """Observations of each bucket alone; the last ones are beyond all bounds."""
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram for a scrape."""
        cumulative = accumulate(self._counts)
        yield HistogramMetricFamily(
            self._name, self._text, buckets=[*zip(self._bounds, cumulative, strict=True)], sum_value=self._sum
        )
