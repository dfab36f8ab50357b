"""Counters, gauges and histograms of a frontend.

They need no lock: only the event loop's thread updates them, or for some series only one other thread. Reporting all of
them takes tens of microseconds, compared with milliseconds for a registry of prometheus_client.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.frontend.metrics.families import metrics_of, snapshot
from tandem.frontend.metrics.reports import InstrumentLayout, Report, families_of


class CounterSeries:
    """Series of a counter."""

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Increase the counter."""
        self.value += amount

    def write(self, values: list[float]) -> None:
        """Append the values of this series."""
        values.append(self.value)


class HistogramSeries:
    """Series of a histogram."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self._counts: list[float] = [0] * (len(buckets) + 1)
        """Number of observations in each bucket; the last bucket is unbounded."""
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Record a value."""
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def write(self, values: list[float]) -> None:
        """Append the values of this series: its buckets, then its sum."""
        values += self._counts
        values.append(self._sum)


class Instrument(Collector):
    """Metric with its series."""

    kind = ""
    """Prometheus type."""

    def __init__(self, name: str, text: str, label_names: Sequence[str], bounds: Sequence[float] = ()) -> None:
        """Initialize a metric without series.

        bounds: upper bounds of the buckets of a histogram.
        """
        self.name = name
        self.text = text
        self.label_names = tuple(label_names)
        self._bounds = (*map(floatToGoString, bounds), "+Inf") if bounds else ()

    def labels_of_series(self) -> tuple[tuple[str, ...], ...]:
        """Return the labels of each series, new ones last."""
        return ((),)

    @abstractmethod
    def write(self, values: list[float]) -> None:
        """Append the values of all series, in the order of their labels."""

    @property
    def layout(self) -> InstrumentLayout:
        """Layout of the values."""
        return InstrumentLayout(
            self.name, self.text, self.kind, self._bounds, self.label_names, self.labels_of_series()
        )

    def collect(self) -> Iterable[Metric]:
        values: list[float] = []
        self.write(values)
        return metrics_of(families_of([self.layout], values))


class Counter(CounterSeries, Instrument):
    """Counter without labels."""

    kind = "counter"

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        CounterSeries.__init__(self)
        Instrument.__init__(self, name, text, ())
        registry.register(self)


class Gauge(Instrument):
    """Gauge without labels."""

    kind = "gauge"

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        super().__init__(name, text, ())
        self.value: float = 0
        self._function: Callable[[], float] | None = None
        registry.register(self)

    def inc(self, amount: float = 1) -> None:
        """Add to the value."""
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        """Subtract from the value."""
        self.value -= amount

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value

    def set_function(self, function: Callable[[], float]) -> None:
        """Call a function for the value at each report."""
        self._function = function

    def write(self, values: list[float]) -> None:
        values.append(self.value if self._function is None else self._function())


class Histogram(HistogramSeries, Instrument):
    """Histogram without labels."""

    kind = "histogram"

    def __init__(self, name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        HistogramSeries.__init__(self, tuple(buckets))
        Instrument.__init__(self, name, text, (), buckets)
        registry.register(self)


class Counters(Instrument):
    """Counter with labels."""

    kind = "counter"

    def __init__(self, name: str, text: str, label_names: Sequence[str], registry: CollectorRegistry) -> None:
        super().__init__(name, text, label_names)
        self._series: dict[tuple[str, ...], CounterSeries] = {}
        registry.register(self)

    def labels(self, *labels: str) -> CounterSeries:
        """Return the counter with these labels, creating it if needed."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = CounterSeries()
        return series

    def labels_of_series(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._series)

    def write(self, values: list[float]) -> None:
        values += [series.value for series in self._series.values()]


class Histograms(Instrument):
    """Histogram with labels."""

    kind = "histogram"

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        super().__init__(name, text, label_names, buckets)
        self._buckets = tuple(buckets)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        registry.register(self)

    def labels(self, *labels: str) -> HistogramSeries:
        """Return the histogram with these labels, creating it if needed."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = HistogramSeries(self._buckets)
        return series

    def labels_of_series(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._series)

    def write(self, values: list[float]) -> None:
        for series in self._series.values():
            series.write(values)


class InstrumentRegistry(CollectorRegistry):
    """Registry that reports its instruments without prometheus_client's overhead."""

    def __init__(self) -> None:
        super().__init__()
        self._instruments: list[Instrument] = []
        self._others: list[Collector] = []
        self._num_reported = -1
        """Number of values in the last report."""

    def register(self, collector: Collector) -> None:
        super().register(collector)
        if isinstance(collector, Instrument):
            self._instruments.append(collector)
        else:
            self._others.append(collector)

    def report(self, with_layout: bool = False) -> Report:
        """Return the current values, with their layout if it has changed.

        It has changed if there are more values, as series are only ever added.
        """
        others = tuple([family for collector in self._others for family in snapshot(collector)])
        values: list[float] = []
        for instrument in self._instruments:
            instrument.write(values)
        layout = None
        if with_layout or len(values) != self._num_reported:
            self._num_reported = len(values)
            layout = tuple([instrument.layout for instrument in self._instruments])
        return Report(values, layout, others)
