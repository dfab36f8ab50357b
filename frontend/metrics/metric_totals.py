"""Totals of Prometheus metrics over several processes, including exited ones."""

from collections.abc import Hashable, Iterable

from msgspec import structs
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.families import Family, added, metrics_of, rounded
from tandem.frontend.metrics.reports import Report, families_of


class MetricTotals(Collector):
    """Collector of totals over processes.

    Counters and histograms of an exited process remain in the totals, so that no counter decreases. A gauge is the sum
    over running processes, and 0 without any, so that no series disappears while a service drains.

    Values are `rounded` before they are summed.
    """

    def __init__(self) -> None:
        self.model_name = ""
        """Last model name reported by a process; "" before."""
        self._running: dict[Hashable, Report] = {}
        """Last report of each process, with its layout."""
        self._ended: tuple[Family, ...] = ()

    def update(self, process: Hashable, report: Report) -> None:
        """Update the values of a process."""
        if report.layout is None and (last := self._running.get(process)) is not None:
            report = structs.replace(report, layout=last.layout)
        self._running[process] = report

    def end(self, process: Hashable) -> None:
        """Keep the counters and histograms of an exited process.

        Its gauges are set to 0.
        """
        report = self._running.pop(process, Report())
        lasting = [_zeroed(family) if family.kind == "gauge" else family for family in _families(report)]
        self._ended = tuple(added([*self._ended, *lasting]))

    def collect(self) -> Iterable[Metric]:
        running = (family for report in self._running.values() for family in _families(report))
        yield from metrics_of(added([*self._ended, *running]))


def _families(report: Report) -> list[Family]:
    """Return the metrics of a report, with values that can be summed."""
    families = [*families_of(report.layout or (), report.values), *report.others]
    return [family if family.kind == "gauge" else rounded(family) for family in families]


def _zeroed(family: Family) -> Family:
    return structs.replace(family, samples=tuple(structs.replace(sample, value=0.0) for sample in family.samples))
