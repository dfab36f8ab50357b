"""Snapshot of the metrics of a process, which can be sent and summed."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from msgspec import Struct, structs
from prometheus_client.metrics_core import Metric

_PER_LIFE = "_created"
"""Suffix of the series with the creation time of a counter, which sums of processes lack."""

_FRACTION = 2.0**20
"""Fractional values are rounded to multiples of 1 / _FRACTION, about a microsecond."""

Labels = tuple[tuple[str, str], ...]


class Sample(Struct, frozen=True, array_like=True):
    """Series and its value."""

    name: str
    labels: Labels
    value: float


class Family(Struct, frozen=True, array_like=True):
    """Metric of a process with its series."""

    name: str
    text: str
    kind: str
    """Prometheus type."""
    samples: tuple[Sample, ...]


class Collected(Protocol):
    """Registry or collector of metrics."""

    def collect(self) -> Iterable[Metric]: ...


def snapshot(source: Collected) -> tuple[Family, ...]:
    """Return the current values of a registry's metrics."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple(
                Sample(sample.name, tuple(sorted(sample.labels.items())), sample.value)
                for sample in metric.samples
                if not sample.name.endswith(_PER_LIFE)
            ),
        )
        for metric in source.collect()
    )


def added(families: Iterable[Family]) -> list[Family]:
    """Sum the families of each name.

    Series keep the order of their first occurrence.
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


def metrics_of(families: Iterable[Family]) -> Iterator[Metric]:
    """Convert families to those of prometheus_client."""
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        for sample in family.samples:
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield metric


def rounded(family: Family) -> Family:
    """Round fractional values.

    Their sums are then exact in any order: a sum that is lower by the last bit would look like a counter reset.
    """
    samples = [
        sample
        if sample.value == int(sample.value)
        else structs.replace(sample, value=round(sample.value * _FRACTION) / _FRACTION)
        for sample in family.samples
    ]
    return structs.replace(family, samples=tuple(samples))
