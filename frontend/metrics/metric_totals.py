"""Sums of the Prometheus metrics of several processes, of which some have ended."""

from collections.abc import Hashable, Iterable

from msgspec import structs
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.families import Family, added, metrics_of, rounded
from tandem.frontend.metrics.reports import Report, families_of


class MetricTotals(Collector):
    """Collector of the sums over processes.

    The counters and histograms of a process that has ended stay in the sums, so that no counter falls. A gauge is the
    sum over the processes that run, and 0 without any, so that no series is gone while a service drains.

    What is added up is `rounded` first.
    """

    def __init__(self) -> None:
        self.model_name = ""
        """Name of the model that a process told last; "" before."""
        self._running: dict[Hashable, Report] = {}
        """Newest report of each process, with its layout."""
        self._ended: tuple[Family, ...] = ()

    def update(self, process: Hashable, report: Report) -> None:
        """Replace what is known of a process by its newest values."""
        if report.layout is None and (last := self._running.get(process)) is not None:
            report = structs.replace(report, layout=last.layout)
        self._running[process] = report

    def end(self, process: Hashable) -> None:
        """Keep the counters and histograms of a process that has ended.

        Its gauges become 0.
        """
        report = self._running.pop(process, Report())
        lasting = [_zeroed(family) if family.kind == "gauge" else family for family in _families(report)]
        self._ended = tuple(added([*self._ended, *lasting]))

    def collect(self) -> Iterable[Metric]:
        running = (family for report in self._running.values() for family in _families(report))
        yield from metrics_of(added([*self._ended, *running]))


def _families(report: Report) -> list[Family]:
    """Return the metrics of a report, with values that can be added up."""
    families = [*families_of(report.layout or (), report.values), *report.others]
    return [family if family.kind == "gauge" else rounded(family) for family in families]


def _zeroed(family: Family) -> Family:
    return structs.replace(family, samples=tuple(structs.replace(sample, value=0.0) for sample in family.samples))
