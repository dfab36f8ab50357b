"""Sums of the Prometheus metrics of several processes, of which some have ended."""

from collections.abc import Hashable, Iterable

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_PER_LIFE = "_created"
"""Suffix of the series that tell when a counter of one process began; a sum of processes has none."""

Labels = tuple[tuple[str, str], ...]


class Sample(Struct, frozen=True, array_like=True):
    """One series and its value."""

    name: str
    labels: Labels
    value: float


class Family(Struct, frozen=True, array_like=True):
    """One metric of a process with its series."""

    name: str
    text: str
    kind: str
    """Type in the words of Prometheus."""
    samples: tuple[Sample, ...]


def snapshot(registry: CollectorRegistry) -> tuple[Family, ...]:
    """Return the present values of a registry's metrics."""
    return tuple(
        Family(metric.name, metric.documentation, metric.type, tuple(
            Sample(sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for sample in metric.samples if not sample.name.endswith(_PER_LIFE)
        ))
        for metric in registry.collect()
    )  # fmt: skip


class MetricTotals(Collector):
    """Collector of the sums over processes.

    The counters and histograms of a process that has ended stay in the sums, so that no counter falls. A gauge is the
    sum over the processes that run.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[Family, ...]] = {}
        self._ended: tuple[Family, ...] = ()

    def update(self, process: Hashable, families: tuple[Family, ...]) -> None:
        """Replace what is known of a process by its newest values."""
        self._running[process] = families

    def end(self, process: Hashable) -> None:
        """Keep the counters and histograms of a process that has ended.

        Its gauges are forgotten.
        """
        lasting = (family for family in self._running.pop(process, ()) if family.kind != "gauge")
        self._ended = tuple(_added([*self._ended, *lasting]))

    def text(self) -> str:
        """Return the sums in the text format of Prometheus."""
        return generate_latest(self).decode()

    def collect(self) -> Iterable[Metric]:
        for family in _added([*self._ended, *(family for running in self._running.values() for family in running)]):
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def _added(families: Iterable[Family]) -> list[Family]:
    """Add up the families of each name.

    Their series keep the order in which they were met first.
    """
    heads: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, Labels], float]] = {}
    for family in families:
        heads.setdefault(family.name, family)
        series = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, sample.labels
            series[key] = series.get(key, 0.0) + sample.value
    return [
        Family(name, head.text, head.kind, tuple(Sample(*key, value) for key, value in sums[name].items()))
        for name, head in heads.items()
    ]
